"""Tests the state of a job array: of all its tasks, by what Slurm 22.05 printed of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli import program
from paceline.schedulers import load, submission
from paceline.schedulers.scheduler import JobState, array_ranges
from paceline.schedulers.script import BatchRequest
from paceline.schedulers.slurm import parse_jobs
from paceline.schedulers.submission import SubmittedJob
from paceline.spec.errors import SettingError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "schedulers" / "slurm"


def printed(name: str) -> str:
    return (FIXTURES / f"array-{name}.job.txt").read_text()


def parsed(name: str) -> JobState:
    state = parse_jobs(printed(name))
    assert state is not None
    return state


@pytest.mark.parametrize(
    ("name", "state", "is_over", "exit_code", "tasks"),
    [
        ("running", "RUNNING", False, 3, "1 of 3 tasks finished; failed: 2 (exit status 3)"),
        ("failed", "FAILED", True, 3, "2 of 3 tasks finished; failed: 2 (exit status 3)"),
        ("waiting", "RUNNING", False, 1, "0 of 20 tasks finished"),
        ("cancelled", "CANCELLED", True, 143, "0 of 20 tasks finished; failed: 1 (exit status 143),"
         " 3 (exit status 143), 5 (exit status 1), 7 (exit status 1) and 16 more"),
    ],
)  # fmt: skip
def test_array_state_is_that_of_all_tasks(
    name: str, state: str, is_over: bool, exit_code: int, tasks: str
) -> None:
    array = parsed(name)
    assert (array.state, array.is_over, array.exit_code) == (state, is_over, exit_code)
    assert array.describe_tasks() == tasks


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("3", [3]),
        ("1-3", [1, 2, 3]),
        ("1,5-9:2%4", [1, 5, 7, 9]),
        ("1,4,...%2", [1, 4]),
        ("", []),
        ("1-3:0,x", [1, 2, 3]),
    ],
)
def test_reads_array_indices(text: str, indices: list[int]) -> None:
    assert [index for part in array_ranges(text) for index in part] == indices


@pytest.fixture
def array(tmp_path: Path) -> SubmittedJob:
    return SubmittedJob(load("slurm"), "1", directory=tmp_path, array="1-3")


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, array: SubmittedJob) -> list[str]:
    """What scontrol prints, one text after the other; the last one stays."""
    texts: list[str] = []

    async def poll(_: str) -> JobState | None:
        return parse_jobs(texts.pop(0) if len(texts) > 1 else texts[0])

    monkeypatch.setattr(array.scheduler, "poll", poll)
    monkeypatch.setattr(submission, "POLL_INTERVAL_S", 0.01)
    return texts


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, show: list[str]) -> str:
    """A run directory of an array whose second task failed; the third has left no folder."""
    folder = tmp_path / "runs" / "af"
    folder.mkdir(parents=True)
    (folder / "batch.json").write_text('{"scheduler": "slurm", "job": "1", "array": "1-3"}')
    for index, code in (("1", 0), ("2", 3)):
        (folder / index).mkdir()
        (folder / index / "plan.json").write_text("{}")
        (folder / index / "result.json").write_text(json.dumps({"exit_code": code}))
    monkeypatch.chdir(tmp_path)
    show.append(printed("failed"))
    return "runs/af"


def follow(job: SubmittedJob) -> tuple[int, list[str]]:
    notes: list[str] = []
    return asyncio.run(submission.follow(job, notes.append)), notes


def test_follow_waits_for_all_tasks_and_names_those_that_failed(
    array: SubmittedJob, show: list[str]
) -> None:
    """The second task has failed while the first runs; its folder tells why."""
    (array.directory / "2").mkdir()
    show += [printed("running"), printed("failed")]
    exit_code, notes = follow(array)
    assert exit_code == 3
    assert notes[0].startswith("paceline: Slurm job 1: RUNNING; 1 of 3 tasks finished; failed: 2")
    assert notes[-1] == (
        "paceline: Slurm job 1: FAILED (NonZeroExitCode); 2 of 3 tasks finished; failed: 2"
        f" (exit status 3): paceline explain {array.directory / '2'}"
    )
    (array.directory / "2").rmdir()  # it failed before Paceline began
    assert follow(array)[1][-1].endswith(
        f": paceline explain --log {array.directory}/slurm-1_2.out"
    )


def test_forgotten_task_without_folder_counts_as_failed(
    array: SubmittedJob, show: list[str]
) -> None:
    """It failed before Paceline began in it."""
    show.append(printed("running").splitlines()[0].replace("RUNNING", "COMPLETED"))
    state = array.state()
    assert state is not None
    assert sorted(state.tasks) == [1, 2, 3]
    assert len(state.failed_tasks()) >= 2


def test_follow_remembers_tasks_that_slurm_forgets(array: SubmittedJob, show: list[str]) -> None:
    """Slurm keeps a task for MinJobAge after its end, and only the last one for longer."""
    last, failed, running = printed("running").splitlines()
    show += ["\n".join([last, failed, running]), "\n".join([last, running]), last]
    (array.directory / "1").mkdir()
    (array.directory / "1" / "result.json").write_text(json.dumps({"exit_code": 0}))
    exit_code, notes = follow(array)
    assert exit_code == 3
    assert "FAILED (NonZeroExitCode); 2 of 3 tasks finished; failed: 2 (exit s" in notes[-1]


def test_forgotten_task_has_the_exit_status_of_its_folder(
    array: SubmittedJob, show: list[str]
) -> None:
    show.append(printed("running").splitlines()[0])
    for index, code in (("1", 0), ("2", 7), ("4", 1)):  # the last is not of this array
        (array.directory / index).mkdir()
        (array.directory / index / "result.json").write_text(json.dumps({"exit_code": code}))
    state = array.state()
    assert state is not None
    assert (state.is_over, state.exit_code) == (True, 7)
    assert state.describe_tasks() == "2 of 3 tasks finished; failed: 2 (exit status 7)"


def test_submission_records_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: SubmittedJob
) -> None:
    monkeypatch.setattr(array.scheduler, "submit", lambda _: "7")
    submitted = submission.submit_job(array.scheduler, "the script", tmp_path / "af", "1-3")
    assert submission.read_submission(tmp_path / "af") == submitted
    assert submitted.outputs == ()


@pytest.mark.parametrize(
    ("array", "variables", "requeued"),
    [
        ("", {"SLURM_JOB_ID": "7"}, "7"),
        (
            "1-3",
            {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"},
            "7_3",
        ),
    ],
)
def test_requeues_only_own_task(
    array: str, variables: dict[str, str], requeued: str, tmp_path: Path
) -> None:
    """The last task has the id of the array, by which Slurm would start all its tasks again."""
    setup = (f'scontrol() {{ echo "$@" > {tmp_path}/typed; }}', "kill -USR1 $$")
    request = BatchRequest("x", "python", ("run",), ("t.py",), str(tmp_path), str(tmp_path), 1,
                           requeue=True, array=array, setup=setup)  # fmt: skip
    script = load("slurm").render(request)
    subprocess.run(["bash", "-c", script], env={"PATH": "/usr/bin:/bin", **variables}, check=False)
    assert (tmp_path / "typed").read_text() == f"requeue {requeued}\n"


def test_status_names_tasks(run: str) -> None:
    result = CliRunner().invoke(program, ["status", run])
    assert result.exit_code == 0
    assert result.output == (
        "runs/af: FAILED (NonZeroExitCode), exit status 3\n"
        "  Slurm job 1\n"
        "  2 of 3 tasks finished; failed: 2 (exit status 3): paceline explain runs/af/2\n"
        "  runs/af/2: failed, exit status 3\n"
        "  runs/af/1: finished, exit status 0\n"
    )
    record = json.loads(CliRunner().invoke(program, ["status", run, "--json"]).output)
    assert record["tasks"][0] == {"run_dir": "runs/af/2", "state": "failed", "exit_code": 3}


def test_status_of_array_that_slurm_forgot_is_that_of_its_folders(
    run: str, show: list[str]
) -> None:
    show[:] = ["slurm_load_jobs error: Invalid job id specified"]
    output = CliRunner().invoke(program, ["status", run]).output
    assert output.startswith("runs/af: failed, exit status 3\n  Slurm job 1\n  runs/af/2: failed")


def test_list_of_runs_has_tasks(run: str) -> None:
    record = json.loads(CliRunner().invoke(program, ["runs", "--json"]).output)
    rows = {row["run"]: (row["state"], row["exit_code"]) for row in record["runs"]}
    assert rows == {
        "af": ("FAILED (NonZeroExitCode)", 3),
        "af/1": ("finished", 0),
        "af/2": ("failed", 3),
    }


@pytest.mark.parametrize("verb", ["logs", "explain", "report"])
def test_names_tasks_for_commands_about_one_run(verb: str, run: str) -> None:
    error = CliRunner().invoke(program, [verb, run]).exception
    assert isinstance(error, SettingError)
    assert error.message.startswith("runs/af is a job array: name one of its tasks")
    assert "runs/af/1: finished" in error.found
    assert error.remedy == f"paceline {verb} runs/af/2"
    assert CliRunner().invoke(program, [verb, f"{run}/1"]).exit_code == 0
