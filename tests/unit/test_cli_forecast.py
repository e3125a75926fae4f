"""Tests ``paceline forecast``: its probes, its errors, and the comparison with a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from paceline.bench import forecast as forecasting
from paceline.bench import saved_forecasts
from paceline.bench.step_model import LinkTiming, Probe, StepTiming
from paceline.cli import program
from paceline.cli.measure import probes, project_code
from paceline.cli.runs import run_end
from paceline.cli.verbs import forecast as forecast_verb
from paceline.cli.verbs.bench import scaling as scaling_verb
from paceline.launch import launcher
from paceline.spec.errors import ConnectError, JobError, SettingError
from paceline.spec.formatting import parse_bit_rate
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Job
from paceline.spec.settings import Setting


class Fake:
    """Stands in for probes: n3 takes three times as long as n1, and n2 a time that can be set."""

    slow_n2 = 1.0

    def __init__(self, hosts: int, **overrides: Any) -> None:
        self.cluster = Cluster(tuple(Host(f"n{number + 1}") for number in range(hosts)))
        self.ctx = SimpleNamespace(
            params={"weak": False, "each_host": False, "link": None, **overrides}
        )
        self.tried: list[tuple[str, tuple[int, ...], tuple[float, ...]]] = []

    def on(self, hosts: Any, *, batches: Any = (), parts: Any = ()) -> Probe:
        names = tuple(host.name for host in hosts)
        self.tried.append((" ".join(names), tuple(batches), tuple(parts)))
        entries = [*batches, *(round(64 * part) for part in parts)]
        factor = 3 if "n3" in names else self.slow_n2 if "n2" in names else 1
        computing = {name: 0.01 * (self.slow_n2 if name == "n2" else 1) for name in names}
        timed = tuple(
            StepTiming(item, factor * 0.01 * item / len(names)) for item in dict.fromkeys(entries)
        )
        wire = LinkTiming(1000, 0.01, 0.001) if len(names) > 1 else None
        return Probe(names, 640, 64, 10, 1000, 1, timed, wire, computing=computing)


KINDS = {"n1": "a", "n2": "a", "n3": "b", "n4": "b"}


measured_links = probes.measure_links


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "measure_links", lambda probing: ({}, KINDS))


def test_probes_host_kinds_and_first_pair() -> None:
    fake = Fake(4)
    model = probes.measure(fake, 8)  # type: ignore[arg-type]
    assert fake.tried == [
        ("n1", (), (1.0, 0.5, 0.125)),
        ("n3", (64, 32, 8), ()),
        ("n1 n2", (64, 16), ()),
    ]
    assert (
        model.host_timings["n2"]
        == model.host_timings["n1"]
        != model.host_timings["n3"]
        == model.host_timings["n4"]
    )
    assert model.hosts[:2] != ("n3", "n4")


def test_assumed_link_probes_single_host() -> None:
    fake = Fake(1, link=8e3)

    model = probes.measure(fake, 2)  # type: ignore[arg-type]

    assert fake.tried == [("n1", (), (1.0, 0.5, 0.5))]
    single, both = forecasting.forecast(model, [1, 2])
    assert not both.declined
    # 64 samples take 0.64 s, or 0.32 s on each of two hosts, plus 1,000 bytes and one message
    assert single.step.seconds == pytest.approx(0.64)
    assert both.step.seconds == pytest.approx(0.32 + 1.0 + 0.001)
    assert both.communication == "int4"
    assert forecasting.conclusion([single, both]) == (
        "fastest: 1 host, 6.4 s of training; with int4 communication: 2 hosts, about 4.5 s"
    )


def test_rejects_link_with_communication_auto() -> None:
    argv = ["forecast", "image", "--link", "100mbit", "--communication", "auto"]

    result = CliRunner().invoke(program, argv)

    assert "auto is tried on two hosts" in str(result.exception)


@pytest.mark.parametrize("text", ["100", "0mbit", "-1gbit", "1e3mbit", "nanmbit", ""])
def test_rejects_invalid_bit_rates(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        parse_bit_rate(text)


def test_parses_bit_rates() -> None:
    rates = [parse_bit_rate(text) for text in ("100mbit", "2.5Gbit/s", "64kbit")]
    assert rates == [100e6, 2.5e9, 64e3]


def test_probes_host_that_differs_from_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise, the time for which one host waits for the other would be blamed on the link."""
    fake = Fake(3)
    fake.slow_n2 = 2.5
    model = probes.measure(fake, 3)  # type: ignore[arg-type]
    assert [names for names, _, _ in fake.tried] == ["n1", "n3", "n1 n2", "n2"]
    assert model.host_timings["n2"] != model.host_timings["n1"]
    assert "n2 computes 2.5 times as long as n1" in capsys.readouterr().err
    similar = Fake(3)
    similar.slow_n2 = 1.2
    probes.measure(similar, 3)  # type: ignore[arg-type]
    assert [names for names, _, _ in similar.tried] == ["n1", "n3", "n1 n2"]


@pytest.mark.parametrize("price", ["nan", "inf", "1e400", "-1"])
def test_rejects_invalid_price(price: str) -> None:
    invocation = CliRunner().invoke(program, ["forecast", "--price", price, "image"])
    assert invocation.exit_code != 0
    assert "--price" in str(invocation.exception) + invocation.output


def test_each_host_and_weak_options_are_applied() -> None:
    fake = Fake(3, each_host=True, weak=True)
    probes.measure(fake, 3)  # type: ignore[arg-type]
    assert [names for names, _, _ in fake.tried] == ["n1", "n2", "n3", "n1 n2"]
    assert fake.tried[-1][1] == (128,)


def test_unreachable_hosts_are_reported_before_probing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.checks import runner

    async def fake_survey(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(refusals={"n3": {"found": "it did not answer"}}, evidence={})

    monkeypatch.setattr(runner, "survey_hosts", fake_survey)
    monkeypatch.setattr(probes, "measure_links", measured_links)
    hosts = tuple(map(Host, ("n1", "n2", "n3")))
    params = {"hosts": "n1,n2,n3", "python": None, "iface": None, "ssh_config": None,
              "accept_new_host_keys": False, "weak": False, "link": None}  # fmt: skip
    probing = SimpleNamespace(
        cluster=Cluster(hosts),
        ctx=SimpleNamespace(params=params),
        dispatch=SimpleNamespace(scheduler=SimpleNamespace(is_direct=True)),
    )
    with pytest.raises(ConnectError, match="1 host cannot be reached: n3") as exc_info:
        probes.measure(probing, 3)  # type: ignore[arg-type]
    assert "n3: it did not answer" in exc_info.value.render()
    assert "-H n1,n2" in exc_info.value.render()


def test_probes_single_host() -> None:
    fake = Fake(1)
    probes.measure(fake, 2)  # type: ignore[arg-type]
    assert [names for names, _, _ in fake.tried] == ["n1"]


def test_rejects_script_without_training_library(tmp_path: Path) -> None:
    """Otherwise, the probe would run the whole script instead of a few steps."""
    job = Entry("script", str(tmp_path / "job.py"))
    (tmp_path / "job.py").write_text("# started by: paceline run job.py\nimport torch")
    (tmp_path / "loop.py").write_text("from paceline import train")
    with pytest.raises(SettingError, match="does not train with paceline"):
        project_code.require_training_library(job)  # only another script does
    (tmp_path / "job.py").write_text("from parts import both")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/__init__.py").write_text("")
    (tmp_path / "parts/both.py").write_text("import json, loop")
    project_code.require_training_library(job)


def test_searches_sent_code_for_training_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Entry("script", "job.py")
    for name in ("job.py", "a.py", "b.py", "c/d.py", "venv/lib/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import torch")
    (tmp_path / "job.py").write_text("importlib.import_module(name)")
    (tmp_path / "venv/pyvenv.cfg").write_text("")
    (tmp_path / "venv/lib/e.py").write_text("import paceline")  # not part of the project
    (tmp_path / "gone.py").symlink_to("nowhere")
    with pytest.raises(SettingError, match="does not train with paceline"):
        project_code.require_training_library(job)
    for module in ("nosuch", "json", "a"):
        with pytest.raises(SettingError, match="does not train with paceline"):
            project_code.require_training_library(Entry("module", module))
    monkeypatch.setattr(project_code, "MAX_FILES", 3)  # not all files were read
    project_code.require_training_library(job)
    monkeypatch.undo()
    (tmp_path / "c/d.py").write_text("from paceline import train")
    monkeypatch.chdir(tmp_path / "c")
    project_code.require_training_library(Entry("script", "../job.py"))
    monkeypatch.setenv("HOME", str(tmp_path))  # a home folder is not a project
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match="does not train with paceline"):
        project_code.require_training_library(job)


def run_forecast(monkeypatch: pytest.MonkeyPatch, *cli_args: str) -> tuple[str, Any, Any]:
    """Runs a forecast without probes; returns its output, its error, and the requested probes."""
    seen: list[Any] = []

    def fake_measure(probing: Any, max_hosts: int) -> Any:
        seen[:] = [probing, max_hosts, [Path(item.path) for item in probing.job.inputs]]
        assert all(path.is_dir() for path in seen[2])
        raise JobError("enough")

    monkeypatch.setattr(forecast_verb, "measure", fake_measure)
    invocation = CliRunner().invoke(program, ["forecast", *cli_args])
    return invocation.output, invocation.exception, seen


def test_probe_uses_recipe_settings_and_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.csv").write_text("text,label\ngood,1\nbad,0\n")
    Path("paceline.toml").write_text("[train.text]\nlr = 0.5\n")
    cli_args = ("--data=my.csv", "--label-column=label")
    _, error, (probing, _, inputs) = run_forecast(monkeypatch, "text", *cli_args)
    assert error.message == "enough"
    args = probing.job.entry.args
    assert {f"--data={tmp_path}/my.csv", "--lr=0.5", "--data-dir", str(inputs[0])} <= set(args)
    assert not inputs[0].exists()
    assert list(Path("runs").iterdir()) == []
    jobs: list[Any] = []

    def fake_ladder(ctx: Any, job: Any, *_: Any, **__: Any) -> Any:
        jobs.append(job)
        raise JobError("enough")

    monkeypatch.setattr(scaling_verb, "run_ladder", fake_ladder)
    CliRunner().invoke(program, ["bench", "scaling", "--recipe", "text", *cli_args])
    shared_args = [arg for arg in args if arg not in (str(inputs[0]), "--data-dir")]
    assert [arg for arg in jobs[0].entry.args if arg in shared_args] == shared_args
    assert len(jobs[0].inputs) == 1


def test_args_omit_overridden_file_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = '[train.image]\nschedule = "step"\nmilestones = [0.3]\nema-start = 3\nlr = 0.5\n'
    Path("paceline.toml").write_text(file)
    _, error, (probing, _, _) = run_forecast(
        monkeypatch, "image", "--schedule", "cosine", "--ema=0"
    )
    assert error.message == "enough"
    expected_args = ("--lr=0.5", "--schedule", "cosine", "--ema=0")
    assert probing.ctx.params["args"] == expected_args


def test_up_to_may_exceed_available_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cli_args = ("-H", "n1,n2", "--nnodes")
    _, error, seen = run_forecast(monkeypatch, *cli_args, "5", "image")
    assert isinstance(error, SettingError)
    assert "5 nodes were asked for" in error.message
    assert not seen
    _, _, (probing, max_hosts, _) = run_forecast(
        monkeypatch, *cli_args, "1", "--up-to", "5", "image"
    )
    assert ([host.name for host in probing.cluster.hosts], max_hosts) == (["n1"], 5)


def test_checks_output_folder_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    _, error, seen = run_forecast(monkeypatch, "--out", "file/below", "image")
    assert isinstance(error, SettingError)
    assert "file/below cannot hold the forecast" in error.message
    assert not seen


def test_prints_table_even_if_saving_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = probes.measure(Fake(2), 2)  # type: ignore[arg-type]
    monkeypatch.setattr(forecast_verb, "measure", lambda probing, max_hosts: model)
    Path("out/forecast.json").mkdir(parents=True)
    invocation = CliRunner().invoke(program, ["forecast", "--out", "out", "image"])
    assert isinstance(invocation.exception, SettingError)
    assert "speed-up" in invocation.stdout
    invocation = CliRunner().invoke(program, ["forecast", "image"])
    assert invocation.exit_code == 0
    (folder,) = Path("runs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["forecast.json", "forecast.svg"]


def test_keeps_logs_of_failed_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes.tempfile, "tempdir", str(tmp_path))
    code, run_dirs = 1, []

    def run_job(*_: Any, run_dir: Path, **__: Any) -> Any:
        run_dir.mkdir()
        (run_dir / "steps.json").write_text('{"steps_done": []}')
        run_dirs.append(run_dir)
        return SimpleNamespace(result=SimpleNamespace(exit_code=code))

    monkeypatch.setattr(launcher, "run_job", run_job)
    monkeypatch.setattr(run_end, "report_failure", lambda outcome: "logs are in …")
    monkeypatch.setattr(probes, "require_transport", lambda params, command: object())
    dispatch = SimpleNamespace()
    ctx = SimpleNamespace(params={"seconds": 0.0})
    job = Job("t", Entry("script", "job.py"), str(tmp_path), "python3")
    probing = probes.Prober(ctx, job, Cluster((Host("n1"),)), dispatch, False)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="the few steps on n1 failed"):
        probing.on((Host("n1"),))
    assert run_dirs[0].is_dir()
    code = 0
    with pytest.raises(JobError, match="ended before its first steps"):
        probing.on((Host("n1"),))
    assert not run_dirs[1].parent.exists()


@pytest.mark.parametrize(
    "content", ["", "{}", '{"steps_done": [1]}', '{"steps_done": [], "exchange": null}']
)
def test_incomplete_steps_file_is_job_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text(content)
    with pytest.raises(JobError, match="ended before its first steps"):
        probes.read_probe(tmp_path / "steps.json")


@pytest.mark.parametrize(
    ("cli_args", "message"),
    [
        ((), "nothing to forecast"),
        (("image", "--find-lr"), "train nothing"),
        (("image", "--batch-per-process", "8"), "remedy: --weak, or --global-batch"),
        (("image", "--communication", "local:5"), "steps of --communication local cannot"),
        (("image", "--plan"), "--plan does not apply"),
        (("imgae",), "there is no recipe or script imgae\n  remedy: did you mean image?"),
        (("--compare", ".", "image"), "--compare takes a run"),
        (("--compare", "."), ". is not a run directory"),
        (("--compare", "short"), "does not tell what a step took"),  # the name of a folder in runs/
    ],
)
def test_rejects_invalid_forecast_commands(cli_args: tuple[str, ...], message: str, tmp_path: Path,
                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/short").mkdir(parents=True)
    (tmp_path / "runs/short/plan.json").write_text("{}")
    invocation = CliRunner().invoke(program, ["forecast", *cli_args])
    assert isinstance(invocation.exception, SettingError)
    assert message in invocation.exception.render()
    assert invocation.exception.exit_code == 2


FORECAST = {"hosts": 2, "seconds": 0.125, "low": 0.1, "high": 0.2, "limit": "link", "declined": "",
       "names": ["n1", "n2"]}  # fmt: skip
FORECAST_JSON = {
    "command": ["script", "job.py", "--lr", "1"], "forecasts": [FORECAST], "weak": False,
    "ranks": 1, "model": {"alone": {"n1": {}, "n2": {}}},
}  # fmt: skip


def write_run(folder: Path, forecast_json: Any, *, entry: Any = None, records: Any = None) -> Path:
    """Writes a run and a forecast beside it."""
    run, forecast_dir = folder / "runs/real", folder / "runs/forecast-1"
    run.mkdir(parents=True, exist_ok=True), forecast_dir.mkdir(exist_ok=True)
    entry = entry or {"kind": "script", "target": "job.py", "args": ["--lr", "1"]}
    nodes = [{"host": name, "ranks": [{"rank": rank}]} for rank, name in enumerate(("n1", "n2"))]
    (run / "plan.json").write_text(json.dumps({"entry": entry, "nodes": nodes}))
    records = records or [
        {"split": "train", "step": step, "samples": 640, "samples_per_s": speed}
        for step, speed in ((10, 100.0), (20, 640.0), (30, 320.0))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in records))
    if forecast_json is not None:
        (forecast_dir / "forecast.json").write_text(
            forecast_json if isinstance(forecast_json, str) else json.dumps(forecast_json)
        )
    return run


def test_compares_run_with_its_forecast(tmp_path: Path) -> None:
    run = write_run(tmp_path, None)
    with pytest.raises(SettingError, match="no forecast of the command"):
        saved_forecasts.comparison(run)
    assert saved_forecasts.compare_at_end(run) == ""
    write_run(tmp_path, FORECAST_JSON)
    compared = saved_forecasts.comparison(run)
    assert compared["came"]["seconds"] == pytest.approx(0.15)  # the first record includes startup
    text = " ".join(saved_forecasts.compare_at_end(run).split())
    assert "forecast to take 0.125 s" in text
    assert "took 0.15 s: 20% longer, inside the error bar" in text
    assert json.loads((run / "forecast.json").read_text()) == compared


def without_key(forecast_json: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in forecast_json.items() if key != name}


DAMAGED = [
    *(
        "",
        "{",
        "[]",
        "null",
        "[" * 9999,
        {**FORECAST_JSON, "forecasts": [1]},
        {**FORECAST_JSON, "forecasts": 1},
    ),
    *({**FORECAST_JSON, "forecasts": [without_key(FORECAST, name)]} for name in FORECAST),
    *(
        {**FORECAST_JSON, "forecasts": [{**FORECAST, "seconds": invalid}]}
        for invalid in (0, -1, None, "1", True, [])
    ),
    *({**FORECAST_JSON, "forecasts": [{**FORECAST, name: {}}]} for name in FORECAST),
    *(without_key(FORECAST_JSON, name) for name in FORECAST_JSON),
    *(
        {**FORECAST_JSON, "command": invalid}
        for invalid in (None, 1, [], ["script"], [[], {}], {"a": 1})
    ),
    *({**FORECAST_JSON, "model": invalid} for invalid in (None, [], {"alone": 1})),
]


@pytest.mark.parametrize("forecast_json", DAMAGED)
def test_damaged_forecast_does_not_fail_run(forecast_json: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path, forecast_json)
    assert saved_forecasts.compare_at_end(run) == ""
    invocation = CliRunner().invoke(program, ["forecast", "--compare", str(run)])
    assert isinstance(invocation.exception, SettingError)
    assert (invocation.exception.exit_code, invocation.stdout) == (2, "")
    forecast_dir = tmp_path / "runs/forecast-0"
    forecast_dir.mkdir()
    (forecast_dir / "forecast.json").write_text(json.dumps(FORECAST_JSON))  # the valid one is used
    assert "forecast to take" in saved_forecasts.compare_at_end(run)


@pytest.mark.parametrize("name", ["step", "samples", "samples_per_s", "split"])
@pytest.mark.parametrize("invalid", [None, "x", [], {}, -1])
def test_damaged_metrics_do_not_fail_run(name: str, invalid: Any, tmp_path: Path) -> None:
    item = {"split": "train", "step": 1, "samples": 640, "samples_per_s": 64.0, name: invalid}
    assert (
        saved_forecasts.compare_at_end(write_run(tmp_path, FORECAST_JSON, records=[item, item]))
        == ""
    )
    run = write_run(tmp_path, FORECAST_JSON)
    for nodes in ([1, None], 1, None):
        (run / "plan.json").write_text(json.dumps({"entry": 1, "nodes": nodes}))
        assert saved_forecasts.compare_at_end(run) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weak": True}, "it is of --weak"),
        ({"ranks": 2}, "it is of 2 ranks on each host"),
        ({"forecasts": [{**FORECAST, "hosts": 4}]}, "it is of other numbers of hosts"),
        ({"forecasts": [{**FORECAST, "declined": "too unsure"}]}, "forecast: too unsure"),
        (
            {
                "forecasts": [{**FORECAST, "names": ["n1", "n3"]}],
                "model": {"alone": {"n1": {}, "n3": {}}},
            },
            "it is of other hosts: n3",
        ),
    ],
)
def test_rejects_forecast_of_different_setup(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path, {**FORECAST_JSON, **changes})
    with pytest.raises(SettingError) as caught:
        saved_forecasts.comparison(run)
    assert message in caught.value.render()
    assert saved_forecasts.compare_at_end(run) == ""


def test_compares_forecast_with_hypothetical_hosts(tmp_path: Path) -> None:
    with_extra_host = {
        "forecasts": [{**FORECAST, "names": ["n1", "n1+1"]}],
        "model": {"alone": {"n1": {}}},
    }
    assert "forecast to take" in saved_forecasts.compare_at_end(
        write_run(tmp_path, {**FORECAST_JSON, **with_extra_host})
    )


def test_matches_recipe_by_step_relevant_options(tmp_path: Path) -> None:
    target = "paceline.recipes.text"
    forecast_json = {
        **FORECAST_JSON,
        "command": ["module", target, "--data=/a.csv", "--data-dir", "/tmp/x"],
    }
    args = ["--data=/a.csv", "--log-every=2", "--keep=1", "--data-dir", "/tmp/y"]
    run = write_run(
        tmp_path, forecast_json, entry={"kind": "module", "target": target, "args": args}
    )
    assert "forecast to take" in saved_forecasts.compare_at_end(run)
    write_run(
        tmp_path,
        forecast_json,
        entry={"kind": "module", "target": target, "args": [*args, "--lr=1"]},
    )
    assert saved_forecasts.compare_at_end(run) == ""


def job_on(count: int, **job_options: Any) -> tuple[Job, Cluster]:
    entry = Entry("script", "job.py", ("--lr", "1"))
    hosts = tuple(Host(f"n{number + 1}") for number in range(count))
    return Job("job", entry, "/", "python3", **job_options), Cluster(hosts)


def test_chooses_fastest_hosts_of_forecast(tmp_path: Path) -> None:
    entries = [
        {**FORECAST, "hosts": 1, "names": ["n2"], "seconds": 0.2, "total": 20.0},
        {**FORECAST, "hosts": 2, "names": ["n1", "n3"], "seconds": 0.1, "total": 10.0},
        {**FORECAST, "hosts": 3, "names": ["n1", "n2", "n3"], "seconds": 0.15, "total": 15.0},
        {
            **FORECAST,
            "hosts": 4,
            "names": ["n1", "n2", "n3", "n3+1"],
            "seconds": 0.01,
            "total": 1.0,
        },
        {**FORECAST, "hosts": 2, "names": ["n1", "n2"], "seconds": 0.01, "declined": "differs"},
    ]
    forecast_json = {
        **FORECAST_JSON,
        "forecasts": entries,
        "model": {"alone": {"n1": {}, "n2": {}, "n3": {}}},
    }
    run = write_run(tmp_path, forecast_json)
    job, cluster = job_on(3)
    selected, explanation = saved_forecasts.choose_fastest(job, cluster, run)
    assert [host.name for host in selected.hosts] == ["n1", "n3"]
    assert selected.among == ("n1", "n2", "n3")  # hosts whose weights may be given
    assert "n1, n3 (2 of 3 hosts): 0.1 s a step" in explanation
    with pytest.raises(SettingError, match="needs a forecast") as raised:  # n4 is not in it
        saved_forecasts.choose_fastest(job, job_on(4)[1], run)
    assert "nothing is known there of n4" in raised.value.render()


@pytest.mark.parametrize(
    ("forecast_json", "job_options", "message"),
    [
        (None, {}, "looked at 0"),
        ({**FORECAST_JSON, "weak": True}, {}, "--weak"),
        (FORECAST_JSON, {"nproc_per_node": Setting(4)}, "1 rank on each host"),
        ({**FORECAST_JSON, "ranks": 2, "asked": 2}, {}, "2 ranks on each host"),
        (
            {**FORECAST_JSON, "asked": "cpu"},
            {"nproc_per_node": Setting("gpu")},
            "1 rank on each host",
        ),
        ({**FORECAST_JSON, "command": ["script", "other.py"]}, {}, "looked at 1"),
        ("{", {}, "is not a forecast"),
        (FORECAST_JSON, {"nnodes": Setting(2)}, "Leave out one of the two"),
    ],
)
def test_rejects_fastest_without_matching_forecast(
    forecast_json: Any, job_options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    job, cluster = job_on(2, **job_options)
    with pytest.raises(SettingError) as raised:
        saved_forecasts.choose_fastest(job, cluster, write_run(tmp_path, forecast_json))
    assert message in raised.value.render()
