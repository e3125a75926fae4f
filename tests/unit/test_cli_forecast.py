"""What ``paceline forecast`` tries, what it refuses, and how a run is put beside it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from paceline.bench.forecast import Probe, Timed, Wire
from paceline.cli import forecast, program
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry


class Fake:
    """Hosts of two kinds; n3 takes three times as long."""

    def __init__(self, hosts: int, **given: Any) -> None:
        self.cluster = Cluster(tuple(Host(f"n{number + 1}") for number in range(hosts)))
        self.ctx = SimpleNamespace(params={"weak": False, "each_host": False, **given})
        self.tried: list[tuple[str, tuple[int, ...], tuple[float, ...]]] = []

    def on(self, hosts: Any, *, batches: Any = (), parts: Any = ()) -> Probe:
        names = tuple(host.name for host in hosts)
        self.tried.append((" ".join(names), tuple(batches), tuple(parts)))
        every = [*batches, *(round(64 * part) for part in parts)]
        slow = 3 if "n3" in names else 1
        timed = tuple(Timed(one, slow * 0.01 * one / len(names)) for one in dict.fromkeys(every))
        wire = Wire(1000, 0.01, 0.001) if len(names) > 1 else None
        return Probe(names, 640, 64, 10, 1000, 1, timed, wire)


KINDS = {"n1": "a", "n2": "a", "n3": "b", "n4": "b"}


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "links", lambda probing: ({}, KINDS))


def test_one_of_each_kind_is_tried_alone_and_the_first_two_together() -> None:
    fake = Fake(4)
    known = forecast.look(fake, 8)  # type: ignore[arg-type]
    assert fake.tried == [
        ("n1", (), (1.0, 0.5, 0.125)),
        ("n3", (64, 32, 8), ()),
        ("n1 n2", (64, 16), ()),
    ]
    assert known.alone["n2"] == known.alone["n1"] != known.alone["n3"] == known.alone["n4"]
    assert known.hosts[:2] != ("n3", "n4")


def test_every_host_on_request_and_the_batch_of_each_kept() -> None:
    fake = Fake(3, each_host=True, weak=True)
    forecast.look(fake, 3)  # type: ignore[arg-type]
    assert [names for names, _, _ in fake.tried] == ["n1", "n2", "n3", "n1 n2"]
    assert fake.tried[-1][1] == (128,)


def test_one_host_alone() -> None:
    fake = Fake(1)
    forecast.look(fake, 2)  # type: ignore[arg-type]
    assert [names for names, _, _ in fake.tried] == ["n1"]


def test_a_script_that_tells_no_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('no library')")
    with pytest.raises(SettingError, match="does not train with paceline"):
        forecast.refuse_without_steps(Entry("script", str(tmp_path / "job.py")))
    (tmp_path / "loop.py").write_text("from paceline import train")  # it imports this one
    forecast.refuse_without_steps(Entry("script", str(tmp_path / "job.py")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to forecast"),
        (("image", "--find-lr"), "train nothing"),
        (("image", "--plan"), "--plan does not apply"),
        (("--compare", ".", "image"), "--compare takes a run"),
        (("--compare", "."), "does not tell what a step took"),
    ],
)
def test_refusals(words: tuple[str, ...], message: str, tmp_path: Path,
                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(program, ["forecast", *words])
    assert isinstance(done.exception, SettingError)
    assert message in done.exception.render()
    assert done.exception.exit_code == 2


def test_a_run_beside_its_forecast(tmp_path: Path) -> None:
    run, told = tmp_path / "runs/real", tmp_path / "runs/forecast-1"
    run.mkdir(parents=True), told.mkdir()
    entry = {"kind": "script", "target": "job.py", "args": ["--lr", "1"]}
    (run / "plan.json").write_text(json.dumps({"entry": entry, "nodes": [{}, {}]}))
    records = [
        {"split": "train", "step": step, "samples": 640, "samples_per_s": speed}
        for step, speed in ((10, 100.0), (20, 640.0), (30, 320.0))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    with pytest.raises(SettingError, match="no forecast of the command"):
        forecast.comparison(run)
    assert forecast.after_run(run) == ""
    one = {"hosts": 2, "seconds": 0.125, "low": 0.1, "high": 0.2, "limit": "link"}
    said = {"command": ["script", "job.py", "--lr", "1"], "forecasts": [one]}
    (told / "forecast.json").write_text(json.dumps(said))
    found = forecast.comparison(run)
    assert found["came"]["seconds"] == pytest.approx(0.15)  # the first record has the start
    text = " ".join(forecast.after_run(run).split())
    assert "forecast to take 0.125 s" in text
    assert "took 0.15 s: 20% longer, inside the error bar" in text
    assert json.loads((run / "forecast.json").read_text()) == found
