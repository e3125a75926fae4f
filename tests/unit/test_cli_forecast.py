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


ONE = {"hosts": 2, "seconds": 0.125, "low": 0.1, "high": 0.2, "limit": "link", "declined": "",
       "names": ["n1", "n2"]}  # fmt: skip
TOLD = {"command": ["script", "job.py", "--lr", "1"], "forecasts": [ONE], "weak": False, "ranks": 1,
        "model": {"alone": {"n1": {}, "n2": {}}}}  # fmt: skip


def made(folder: Path, told: Any, *, entry: Any = None, records: Any = None) -> Path:
    """A run, and a forecast near it."""
    run, near = folder / "runs/real", folder / "runs/forecast-1"
    run.mkdir(parents=True, exist_ok=True), near.mkdir(exist_ok=True)
    entry = entry or {"kind": "script", "target": "job.py", "args": ["--lr", "1"]}
    nodes = [{"host": name, "ranks": [{"rank": rank}]} for rank, name in enumerate(("n1", "n2"))]
    (run / "plan.json").write_text(json.dumps({"entry": entry, "nodes": nodes}))
    records = records or [
        {"split": "train", "step": step, "samples": 640, "samples_per_s": speed}
        for step, speed in ((10, 100.0), (20, 640.0), (30, 320.0))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    if told is not None:
        (near / "forecast.json").write_text(told if isinstance(told, str) else json.dumps(told))
    return run


def test_a_run_beside_its_forecast(tmp_path: Path) -> None:
    run = made(tmp_path, None)
    with pytest.raises(SettingError, match="no forecast of the command"):
        forecast.comparison(run)
    assert forecast.after_run(run) == ""
    made(tmp_path, TOLD)
    found = forecast.comparison(run)
    assert found["came"]["seconds"] == pytest.approx(0.15)  # the first record has the start
    text = " ".join(forecast.after_run(run).split())
    assert "forecast to take 0.125 s" in text
    assert "took 0.15 s: 20% longer, inside the error bar" in text
    assert json.loads((run / "forecast.json").read_text()) == found


def without(told: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in told.items() if key != name}


DAMAGED = [
    *("", "{", "[]", "null", "[" * 9999, {**TOLD, "forecasts": [1]}, {**TOLD, "forecasts": 1}),
    *({**TOLD, "forecasts": [without(ONE, name)]} for name in ONE),
    *({**TOLD, "forecasts": [{**ONE, "seconds": odd}]} for odd in (0, -1, None, "1", True, [])),
    *({**TOLD, "forecasts": [{**ONE, name: {}}]} for name in ONE),
    *(without(TOLD, name) for name in TOLD),
    *({**TOLD, "command": odd} for odd in (None, 1, [], ["script"], [[], {}], {"a": 1})),
    *({**TOLD, "model": odd} for odd in (None, [], {"alone": 1})),
]


@pytest.mark.parametrize("told", DAMAGED)
def test_a_damaged_forecast_fails_no_run(told: Any, tmp_path: Path) -> None:
    run = made(tmp_path, told)
    assert forecast.after_run(run) == ""
    done = CliRunner().invoke(program, ["forecast", "--compare", str(run)])
    assert isinstance(done.exception, SettingError)
    assert (done.exception.exit_code, done.stdout) == (2, "")
    near = tmp_path / "runs/forecast-0"
    near.mkdir()
    (near / "forecast.json").write_text(json.dumps(TOLD))  # a sound one beside it counts
    assert "forecast to take" in forecast.after_run(run)


@pytest.mark.parametrize("name", ["step", "samples", "samples_per_s", "split"])
@pytest.mark.parametrize("odd", [None, "x", [], {}, -1])
def test_damaged_records_fail_no_run(name: str, odd: Any, tmp_path: Path) -> None:
    one = {"split": "train", "step": 1, "samples": 640, "samples_per_s": 64.0, name: odd}
    assert forecast.after_run(made(tmp_path, TOLD, records=[one, one])) == ""
    run = made(tmp_path, TOLD)
    for nodes in ([1, None], 1, None):
        (run / "plan.json").write_text(json.dumps({"entry": 1, "nodes": nodes}))
        assert forecast.after_run(run) == ""


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"weak": True}, "it is of --weak"),
        ({"ranks": 2}, "it is of 2 ranks on each host"),
        ({"forecasts": [{**ONE, "hosts": 4}]}, "it is of other numbers of hosts"),
        ({"forecasts": [{**ONE, "declined": "too unsure"}]}, "forecast: too unsure"),
        (
            {
                "forecasts": [{**ONE, "names": ["n1", "n3"]}],
                "model": {"alone": {"n1": {}, "n3": {}}},
            },
            "it is of other hosts: n3",
        ),
    ],
)
def test_a_forecast_of_something_else_is_not_put_beside(
    other: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = made(tmp_path, {**TOLD, **other})
    with pytest.raises(SettingError) as caught:
        forecast.comparison(run)
    assert message in caught.value.render()
    assert forecast.after_run(run) == ""


def test_hosts_beyond_those_that_there_were_may_be_any(tmp_path: Path) -> None:
    beyond = {"forecasts": [{**ONE, "names": ["n1", "n1+1"]}], "model": {"alone": {"n1": {}}}}
    assert "forecast to take" in forecast.after_run(made(tmp_path, {**TOLD, **beyond}))


def test_a_recipe_is_known_again_by_what_changes_a_step(tmp_path: Path) -> None:
    target = "paceline.recipes.text"
    told = {**TOLD, "command": ["module", target, "--data=/a.csv", "--data-dir", "/tmp/x"]}
    args = ["--data=/a.csv", "--log-every=2", "--keep=1", "--data-dir", "/tmp/y"]
    run = made(tmp_path, told, entry={"kind": "module", "target": target, "args": args})
    assert "forecast to take" in forecast.after_run(run)
    made(tmp_path, told, entry={"kind": "module", "target": target, "args": [*args, "--lr=1"]})
    assert forecast.after_run(run) == ""
