"""Tests that a link or pipe in place of a record in a run directory is replaced and never used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.agent.files import safe_paths
from paceline.bench import saved_forecasts
from paceline.bench.link_rates import LinkRates
from paceline.checks import preflight
from paceline.cli.verbs.bench import collectives, scaling
from paceline.rundir import directory
from paceline.schedulers import load, submission
from paceline.spec import rundir as names
from paceline.spec.errors import SettingError
from paceline.train.files import RecordFile

pytestmark = pytest.mark.timeout(120)  # a pipe without a reader blocks its writer


def write_findings(run: Path) -> None:
    preflight._write(run, [], [])


def write_submission(run: Path) -> None:
    submission.submit_job(load("slurm"), "the script", run)


def write_comparison(run: Path) -> None:
    saved_forecasts.save_comparison(run)


def write_scaling(run: Path) -> None:
    scaling.write_results(run, [])


def write_collectives(run: Path) -> None:
    from paceline.bench.collectives_job import write_result

    write_result(run, {"rows": []})


def draw_links(run: Path) -> None:
    links = {("n1", "n2"): 1e9, ("n2", "n1"): 1e9}
    measurements = collectives.Measurements((), {}, links, (), None, LinkRates(), {})
    collectives.draw(run / "links.svg", measurements)


def write_record(run: Path) -> None:
    directory.write_text(run, "forecast.svg", "a picture")


WRITERS: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (write_findings, (names.FINDINGS,)),
    (write_submission, ("job.sbatch", names.BATCH)),
    (write_comparison, (names.FORECAST,)),
    (write_scaling, ("scaling.json", "scaling.svg")),
    (write_collectives, (names.COLLECTIVES,)),
    (draw_links, ("links.svg",)),
    (write_record, ("forecast.svg",)),
]
IDS = [write.__name__ for write, _ in WRITERS]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(type(load("slurm")), "submit", lambda self, script: "12")
    monkeypatch.setattr(saved_forecasts, "comparison", lambda run: {"hosts": 1})
    monkeypatch.setattr(scaling.scaling, "draw", lambda rows: "a picture")
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.mark.parametrize(("write", "written"), WRITERS, ids=IDS)
def test_replaces_link_instead_of_following(
    write: Callable[[Path], None], written: tuple[str, ...], run: Path
) -> None:
    victims = [run.parent / f"victim-{name}" for name in written]
    for name, victim in zip(written, victims, strict=True):
        victim.write_text("mine")
        (run / name).symlink_to(f"../{victim.name}")
    write(run)
    for name, victim in zip(written, victims, strict=True):
        assert victim.read_text() == "mine"
        assert not (run / name).is_symlink()
        assert (run / name).read_text()


@pytest.mark.parametrize(("write", "written"), WRITERS, ids=IDS)
def test_replaces_pipe_without_blocking(
    write: Callable[[Path], None], written: tuple[str, ...], run: Path
) -> None:
    for name in written:
        os.mkfifo(run / name)
    write(run)
    for name in written:
        assert (run / name).is_file()


@pytest.mark.parametrize(("write", "written"), WRITERS, ids=IDS)
def test_writes_only_expected_files(
    write: Callable[[Path], None], written: tuple[str, ...], run: Path
) -> None:
    write(run)
    remaining = {path.name for path in run.iterdir()} - {names.FETCHED_LIST}
    is_run_open = write is write_findings  # the launcher of the run clears the folder when it ends
    assert remaining == {*written} | ({safe_paths.INCOMING} if is_run_open else set())


@pytest.mark.parametrize("name", ["job.sbatch", names.BATCH, names.FETCHED_LIST])
def test_submission_error_if_folder_blocks_record(name: str, run: Path) -> None:
    (run / name / "full").mkdir(parents=True)
    with pytest.raises(SettingError, match="cannot write to the run directory") as caught:
        write_submission(run)
    assert ("job 12 is submitted" in caught.value.message) == (name == names.BATCH)


def test_measurement_error_if_folder_blocks_record(run: Path) -> None:
    for name in ("scaling.json", "links.svg"):
        (run / name / "full").mkdir(parents=True)
    for write in (write_scaling, draw_links):
        with pytest.raises(SettingError, match="cannot"):
            write(run)


def test_unwritable_findings_are_ignored(run: Path) -> None:
    (run / names.FINDINGS / "full").mkdir(parents=True)
    write_findings(run)


def test_training_records_do_not_block_on_pipe(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training continues without its records."""
    os.mkfifo(run / names.METRICS)
    records = RecordFile(run / names.METRICS)
    reader = os.open(run / names.METRICS, os.O_RDONLY | os.O_NONBLOCK)
    for step in (1, 2):
        records.append({"split": "train", "step": step})
        assert not os.read(reader, 100)
    os.close(reader)
    records.append({"split": "train", "step": 3})
    assert "not a plain file" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_unwritable_events_file_ends_run_with_error(kind: str, run: Path) -> None:
    """The connections are closed before the event loop is closed."""
    events = run / names.EVENTS
    if kind == "pipe":
        os.mkfifo(events)
    else:
        events.mkdir()
    (run.parent / "job.py").write_text("")
    options = ["--no-torch", "-H", "localhost", "--run-dir", str(run)]
    completed = subprocess.run(
        [sys.executable, "-m", "paceline", "run", *options, "job.py"],
        cwd=run.parent, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert completed.returncode == 1
    assert f"cannot write to the run directory {run}" in completed.stderr
    assert "Exception ignored" not in completed.stderr
    assert "Traceback" not in completed.stderr
    assert not (run.parent / "victim").exists()
