"""What ``paceline forecast`` tries, what it refuses, and how a run is put beside it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from paceline.bench import forecast as forecasting
from paceline.bench.step_model import LinkTiming, Probe, StepTiming
from paceline.cli import program
from paceline.cli.measure import forecasts, probes, project_code
from paceline.cli.verbs import forecast as forecast_verb
from paceline.cli.verbs.bench import scaling as scaling_verb
from paceline.launch import launcher
from paceline.launch.results import summary
from paceline.spec.errors import ConnectError, JobError, SettingError
from paceline.spec.formatting import parse_bit_rate
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Job
from paceline.spec.settings import Setting


class Fake:
    """Hosts of two kinds; n3 takes three times as long, and n2 as many times as is said."""

    slow_n2 = 1.0

    def __init__(self, hosts: int, **given: Any) -> None:
        self.cluster = Cluster(tuple(Host(f"n{number + 1}") for number in range(hosts)))
        self.ctx = SimpleNamespace(
            params={"weak": False, "each_host": False, "link": None, **given}
        )
        self.tried: list[tuple[str, tuple[int, ...], tuple[float, ...]]] = []

    def on(self, hosts: Any, *, batches: Any = (), parts: Any = ()) -> Probe:
        names = tuple(host.name for host in hosts)
        self.tried.append((" ".join(names), tuple(batches), tuple(parts)))
        every = [*batches, *(round(64 * part) for part in parts)]
        slow = 3 if "n3" in names else self.slow_n2 if "n2" in names else 1
        computing = {name: 0.01 * (self.slow_n2 if name == "n2" else 1) for name in names}
        timed = tuple(
            StepTiming(one, slow * 0.01 * one / len(names)) for one in dict.fromkeys(every)
        )
        wire = LinkTiming(1000, 0.01, 0.001) if len(names) > 1 else None
        return Probe(names, 640, 64, 10, 1000, 1, timed, wire, computing=computing)


KINDS = {"n1": "a", "n2": "a", "n3": "b", "n4": "b"}


measured_links = probes.measure_links


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "measure_links", lambda probing: ({}, KINDS))


def test_one_of_each_kind_is_tried_alone_and_the_first_two_together() -> None:
    fake = Fake(4)
    known = probes.measure(fake, 8)  # type: ignore[arg-type]
    assert fake.tried == [
        ("n1", (), (1.0, 0.5, 0.125)),
        ("n3", (64, 32, 8), ()),
        ("n1 n2", (64, 16), ()),
    ]
    assert (
        known.host_timings["n2"]
        == known.host_timings["n1"]
        != known.host_timings["n3"]
        == known.host_timings["n4"]
    )
    assert known.hosts[:2] != ("n3", "n4")


def test_with_an_assumed_link_only_one_host_is_tried() -> None:
    fake = Fake(1, link=8e3)

    known = probes.measure(fake, 2)  # type: ignore[arg-type]

    assert fake.tried == [("n1", (), (1.0, 0.5, 0.5))]
    alone, both = forecasting.forecast(known, [1, 2])
    assert not both.declined
    # 64 samples take 0.64 s, or 0.32 s on each of two; then 1,000 bytes travel, and a message does
    assert alone.step.seconds == pytest.approx(0.64)
    assert both.step.seconds == pytest.approx(0.32 + 1.0 + 0.001)
    assert both.communication == "int4"
    assert forecasting.conclusion([alone, both]) == (
        "fastest: 1 host, 6.4 s of training; with --communication int4: 2 hosts, about 4.5 s"
    )


def test_a_link_is_not_assumed_for_a_method_that_has_to_be_tried() -> None:
    argv = ["forecast", "image", "--link", "100mbit", "--communication", "auto"]

    result = CliRunner().invoke(program, argv)

    assert "auto is tried on two hosts" in str(result.exception)


@pytest.mark.parametrize("text", ["100", "0mbit", "-1gbit", "1e3mbit", "nanmbit", ""])
def test_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        parse_bit_rate(text)


def test_rates() -> None:
    rates = [parse_bit_rate(text) for text in ("100mbit", "2.5Gbit/s", "64kbit")]
    assert rates == [100e6, 2.5e9, 64e3]


def test_hosts_of_a_kind_that_differ_are_tried_each(capsys: pytest.CaptureFixture[str]) -> None:
    """Else the time for which one waits for the other would be the link's."""
    fake = Fake(3)
    fake.slow_n2 = 2.5
    known = probes.measure(fake, 3)  # type: ignore[arg-type]
    assert [names for names, _, _ in fake.tried] == ["n1", "n3", "n1 n2", "n2"]
    assert known.host_timings["n2"] != known.host_timings["n1"]
    assert "n2 computes 2.5 times as long as n1" in capsys.readouterr().err
    alike = Fake(3)
    alike.slow_n2 = 1.2
    probes.measure(alike, 3)  # type: ignore[arg-type]
    assert [names for names, _, _ in alike.tried] == ["n1", "n3", "n1 n2"]


@pytest.mark.parametrize("price", ["nan", "inf", "1e400", "-1"])
def test_a_price_is_a_number(price: str) -> None:
    done = CliRunner().invoke(program, ["forecast", "--price", price, "image"])
    assert done.exit_code != 0
    assert "--price" in str(done.exception) + done.output


def test_every_host_on_request_and_the_batch_of_each_kept() -> None:
    fake = Fake(3, each_host=True, weak=True)
    probes.measure(fake, 3)  # type: ignore[arg-type]
    assert [names for names, _, _ in fake.tried] == ["n1", "n2", "n3", "n1 n2"]
    assert fake.tried[-1][1] == (128,)


def test_hosts_that_are_away_are_named_before_anything_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.checks import runner

    async def examined(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(refusals={"n3": {"found": "it did not answer"}}, evidence={})

    monkeypatch.setattr(runner, "survey_hosts", examined)
    monkeypatch.setattr(probes, "measure_links", measured_links)
    hosts = tuple(map(Host, ("n1", "n2", "n3")))
    params = {"hosts": "n1,n2,n3", "python": None, "iface": None, "ssh_config": None,
              "accept_new_host_keys": False, "weak": False, "link": None}  # fmt: skip
    probing = SimpleNamespace(
        cluster=Cluster(hosts),
        ctx=SimpleNamespace(params=params),
        dispatch=SimpleNamespace(scheduler=SimpleNamespace(is_direct=True)),
    )
    with pytest.raises(ConnectError, match="1 host cannot be reached: n3") as refused:
        probes.measure(probing, 3)  # type: ignore[arg-type]
    assert "n3: it did not answer" in refused.value.render()
    assert "-H n1,n2" in refused.value.render()


def test_one_host_alone() -> None:
    fake = Fake(1)
    probes.measure(fake, 2)  # type: ignore[arg-type]
    assert [names for names, _, _ in fake.tried] == ["n1"]


def test_a_script_that_tells_no_steps_is_refused(tmp_path: Path) -> None:
    """Else all of it would run, in the place of a few steps."""
    job = Entry("script", str(tmp_path / "job.py"))
    (tmp_path / "job.py").write_text("# started by: paceline run job.py\nimport torch")
    (tmp_path / "loop.py").write_text("from paceline import train")
    with pytest.raises(SettingError, match="does not train with paceline"):
        project_code.require_training_library(job)  # another script of the same folder does
    (tmp_path / "job.py").write_text("from parts import both")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/__init__.py").write_text("")
    (tmp_path / "parts/both.py").write_text("import json, loop")
    project_code.require_training_library(job)


def test_all_code_that_is_sent_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Entry("script", "job.py")
    for name in ("job.py", "a.py", "b.py", "c/d.py", "venv/lib/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import torch")
    (tmp_path / "job.py").write_text("importlib.import_module(name)")
    (tmp_path / "venv/pyvenv.cfg").write_text("")
    (tmp_path / "venv/lib/e.py").write_text("import paceline")  # it is no code of the project
    (tmp_path / "gone.py").symlink_to("nowhere")
    with pytest.raises(SettingError, match="does not train with paceline"):
        project_code.require_training_library(job)
    for module in ("nosuch", "json", "a"):
        with pytest.raises(SettingError, match="does not train with paceline"):
            project_code.require_training_library(Entry("module", module))
    monkeypatch.setattr(project_code, "MAX_FILES", 3)  # the others were not looked at
    project_code.require_training_library(job)
    monkeypatch.undo()
    (tmp_path / "c/d.py").write_text("from paceline import train")
    monkeypatch.chdir(tmp_path / "c")
    project_code.require_training_library(Entry("script", "../job.py"))


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[str, Any, Any]:
    """What a forecast says, how it ends, and what it would have tried."""
    seen: list[Any] = []

    def look(probing: Any, most: int) -> Any:
        seen[:] = [probing, most, [Path(one.path) for one in probing.job.inputs]]
        assert all(path.is_dir() for path in seen[2])
        raise JobError("enough")

    monkeypatch.setattr(forecast_verb, "measure", look)
    done = CliRunner().invoke(program, ["forecast", *words])
    return done.output, done.exception, seen


def test_a_recipe_is_tried_with_all_that_its_training_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.csv").write_text("text,label\ngood,1\nbad,0\n")
    Path("paceline.toml").write_text("[train.text]\nlr = 0.5\n")
    words = ("--data=my.csv", "--label-column=label")
    _, error, (probing, _, inputs) = typed(monkeypatch, "text", *words)
    assert error.message == "enough"
    args = probing.job.entry.args
    assert {f"--data={tmp_path}/my.csv", "--lr=0.5", "--data-dir", str(inputs[0])} <= set(args)
    assert not inputs[0].exists()
    assert list(Path("runs").iterdir()) == []
    tried: list[Any] = []

    def climb(ctx: Any, job: Any, *_: Any, **__: Any) -> Any:
        tried.append(job)
        raise JobError("enough")

    monkeypatch.setattr(scaling_verb, "run_ladder", climb)
    CliRunner().invoke(program, ["bench", "scaling", "--recipe", "text", *words])
    same = [word for word in args if word not in (str(inputs[0]), "--data-dir")]
    assert [word for word in tried[0].entry.args if word in same] == same
    assert len(tried[0].inputs) == 1


def test_a_batch_is_told_of_the_file_what_counts_beside_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = '[train.image]\nschedule = "step"\nmilestones = [0.3]\nema-start = 3\nlr = 0.5\n'
    Path("paceline.toml").write_text(file)
    _, error, (probing, _, _) = typed(monkeypatch, "image", "--schedule", "cosine", "--ema=0")
    assert error.message == "enough"
    again = ("--lr=0.5", "--schedule", "cosine", "--ema=0")
    assert probing.ctx.params["args"] == again


def test_no_more_hosts_than_there_are_but_by_up_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("-H", "n1,n2", "--nnodes")
    _, error, seen = typed(monkeypatch, *words, "5", "image")
    assert isinstance(error, SettingError)
    assert "5 nodes were asked for" in error.message
    assert not seen
    _, _, (probing, most, _) = typed(monkeypatch, *words, "1", "--up-to", "5", "image")
    assert ([host.name for host in probing.cluster.hosts], most) == (["n1"], 5)


def test_the_folder_is_there_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    _, error, seen = typed(monkeypatch, "--out", "file/below", "image")
    assert isinstance(error, SettingError)
    assert "file/below cannot hold the forecast" in error.message
    assert not seen


def test_the_table_is_said_even_where_it_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = probes.measure(Fake(2), 2)  # type: ignore[arg-type]
    monkeypatch.setattr(forecast_verb, "measure", lambda probing, most: known)
    Path("out/forecast.json").mkdir(parents=True)
    done = CliRunner().invoke(program, ["forecast", "--out", "out", "image"])
    assert isinstance(done.exception, SettingError)
    assert "speed-up" in done.stdout
    done = CliRunner().invoke(program, ["forecast", "image"])
    assert done.exit_code == 0
    (folder,) = Path("runs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["forecast.json", "forecast.svg"]


def test_logs_of_a_try_that_failed_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes.tempfile, "tempdir", str(tmp_path))
    code, kept = 1, []

    def run_job(*_: Any, run_dir: Path, **__: Any) -> Any:
        run_dir.mkdir()
        (run_dir / "steps.json").write_text('{"steps_done": []}')
        kept.append(run_dir)
        return SimpleNamespace(result=SimpleNamespace(exit_code=code))

    monkeypatch.setattr(launcher, "run_job", run_job)
    monkeypatch.setattr(summary, "report_failure", lambda outcome: "logs are in …")
    monkeypatch.setattr(probes, "require_transport", lambda params, what: object())
    dispatch = SimpleNamespace()
    ctx = SimpleNamespace(params={"seconds": 0.0})
    job = Job("t", Entry("script", "job.py"), str(tmp_path), "python3")
    probing = probes.Prober(ctx, job, Cluster((Host("n1"),)), dispatch, False)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="the few steps on n1 failed"):
        probing.on((Host("n1"),))
    assert kept[0].is_dir()
    code = 0
    with pytest.raises(JobError, match="ended before its first steps"):
        probing.on((Host("n1"),))
    assert not kept[1].parent.exists()


@pytest.mark.parametrize(
    "said", ["", "{}", '{"steps_done": [1]}', '{"steps_done": [], "exchange": null}']
)
def test_incomplete_steps_are_an_error_of_the_job(said: str, tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text(said)
    with pytest.raises(JobError, match="ended before its first steps"):
        probes.read_probe(tmp_path / "steps.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to forecast"),
        (("image", "--find-lr"), "train nothing"),
        (("image", "--batch-per-process", "8"), "remedy: --weak, or --global-batch"),
        (("image", "--communication", "local:5"), "steps of --communication local cannot"),
        (("image", "--plan"), "--plan does not apply"),
        (("imgae",), "there is no recipe or script imgae\n  remedy: did you mean image?"),
        (("--compare", ".", "image"), "--compare takes a run"),
        (("--compare", "."), ". is not a run directory"),
        (("--compare", "short"), "does not tell what a step took"),  # its name below runs/
    ],
)
def test_refusals(words: tuple[str, ...], message: str, tmp_path: Path,
                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/short").mkdir(parents=True)
    (tmp_path / "runs/short/plan.json").write_text("{}")
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
        forecasts.comparison(run)
    assert forecasts.compare_at_end(run) == ""
    made(tmp_path, TOLD)
    found = forecasts.comparison(run)
    assert found["came"]["seconds"] == pytest.approx(0.15)  # the first record has the start
    text = " ".join(forecasts.compare_at_end(run).split())
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
    assert forecasts.compare_at_end(run) == ""
    done = CliRunner().invoke(program, ["forecast", "--compare", str(run)])
    assert isinstance(done.exception, SettingError)
    assert (done.exception.exit_code, done.stdout) == (2, "")
    near = tmp_path / "runs/forecast-0"
    near.mkdir()
    (near / "forecast.json").write_text(json.dumps(TOLD))  # a sound one beside it counts
    assert "forecast to take" in forecasts.compare_at_end(run)


@pytest.mark.parametrize("name", ["step", "samples", "samples_per_s", "split"])
@pytest.mark.parametrize("odd", [None, "x", [], {}, -1])
def test_damaged_records_fail_no_run(name: str, odd: Any, tmp_path: Path) -> None:
    one = {"split": "train", "step": 1, "samples": 640, "samples_per_s": 64.0, name: odd}
    assert forecasts.compare_at_end(made(tmp_path, TOLD, records=[one, one])) == ""
    run = made(tmp_path, TOLD)
    for nodes in ([1, None], 1, None):
        (run / "plan.json").write_text(json.dumps({"entry": 1, "nodes": nodes}))
        assert forecasts.compare_at_end(run) == ""


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
        forecasts.comparison(run)
    assert message in caught.value.render()
    assert forecasts.compare_at_end(run) == ""


def test_hosts_beyond_those_that_there_were_may_be_any(tmp_path: Path) -> None:
    beyond = {"forecasts": [{**ONE, "names": ["n1", "n1+1"]}], "model": {"alone": {"n1": {}}}}
    assert "forecast to take" in forecasts.compare_at_end(made(tmp_path, {**TOLD, **beyond}))


def test_a_recipe_is_known_again_by_what_changes_a_step(tmp_path: Path) -> None:
    target = "paceline.recipes.text"
    told = {**TOLD, "command": ["module", target, "--data=/a.csv", "--data-dir", "/tmp/x"]}
    args = ["--data=/a.csv", "--log-every=2", "--keep=1", "--data-dir", "/tmp/y"]
    run = made(tmp_path, told, entry={"kind": "module", "target": target, "args": args})
    assert "forecast to take" in forecasts.compare_at_end(run)
    made(tmp_path, told, entry={"kind": "module", "target": target, "args": [*args, "--lr=1"]})
    assert forecasts.compare_at_end(run) == ""


def job_on(count: int, **more: Any) -> tuple[Job, Cluster]:
    entry = Entry("script", "job.py", ("--lr", "1"))
    hosts = tuple(Host(f"n{number + 1}") for number in range(count))
    return Job("job", entry, "/", "python3", **more), Cluster(hosts)


def test_the_fastest_hosts_of_a_forecast_are_taken(tmp_path: Path) -> None:
    every = [
        {**ONE, "hosts": 1, "names": ["n2"], "seconds": 0.2, "total": 20.0},
        {**ONE, "hosts": 2, "names": ["n1", "n3"], "seconds": 0.1, "total": 10.0},
        {**ONE, "hosts": 3, "names": ["n1", "n2", "n3"], "seconds": 0.15, "total": 15.0},
        {**ONE, "hosts": 4, "names": ["n1", "n2", "n3", "n3+1"], "seconds": 0.01, "total": 1.0},
        {**ONE, "hosts": 2, "names": ["n1", "n2"], "seconds": 0.01, "declined": "differs"},
    ]
    told = {**TOLD, "forecasts": every, "model": {"alone": {"n1": {}, "n2": {}, "n3": {}}}}
    run = made(tmp_path, told)
    job, cluster = job_on(3)
    chosen, why = forecasts.choose_fastest(job, cluster, run)
    assert [host.name for host in chosen.hosts] == ["n1", "n3"]
    assert chosen.among == ("n1", "n2", "n3")  # of which weights may be stated
    assert "n1, n3 (2 of 3 hosts): 0.1 s a step" in why
    with pytest.raises(SettingError, match="needs a forecast") as raised:  # n4 was not looked at
        forecasts.choose_fastest(job, job_on(4)[1], run)
    assert "nothing is known there of n4" in raised.value.render()


@pytest.mark.parametrize(
    ("told", "more", "message"),
    [
        (None, {}, "looked at 0"),
        ({**TOLD, "weak": True}, {}, "--weak"),
        (TOLD, {"nproc_per_node": Setting(4)}, "1 rank on each host"),
        ({**TOLD, "ranks": 2, "asked": 2}, {}, "2 ranks on each host"),
        ({**TOLD, "asked": "cpu"}, {"nproc_per_node": Setting("gpu")}, "1 rank on each host"),
        ({**TOLD, "command": ["script", "other.py"]}, {}, "looked at 1"),
        ("{", {}, "is not a forecast"),
        (TOLD, {"nnodes": Setting(2)}, "Leave out one of the two"),
    ],
)
def test_no_hosts_are_taken_for_the_fastest_without_a_forecast_of_them(
    told: Any, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    job, cluster = job_on(2, **more)
    with pytest.raises(SettingError) as raised:
        forecasts.choose_fastest(job, cluster, made(tmp_path, told))
    assert message in raised.value.render()
