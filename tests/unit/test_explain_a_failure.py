"""Tests the explanation after a failed run: time limit, Ctrl-C, and the named cause."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.runs import run_end
from paceline.explain.conclusion import conclude
from paceline.explain.evidence import Evidence, Log
from paceline.explain.evidence_reader import from_log
from paceline.explain.rules import killed, load_all, uneven_data
from paceline.report.explanation import lines
from paceline.spec.errors import ConnectError, SettingError
from paceline.spec.events import Event
from paceline.spec.failure import Failure, Result
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Job, NodeCount, NodeRange
from paceline.spec.settings import Setting, Source

JOB = Job("train", Entry("script", "train.py"), "/", "python3")


def test_slow_rule_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_end, "explain_failure", lambda *run: re.match("(a+)+$", "a" * 60 + "b"))
    monkeypatch.setattr(run_end, "EXPLAIN_S", 0.2)
    run_end.explain_run(tmp_path, Result(1), (), is_shown=True)
    assert "to find the cause: paceline explain" in capsys.readouterr().err


def test_ctrl_c_in_explanation_keeps_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain KeyboardInterrupt raised in ``exec`` would make Python exit by SIGINT."""

    def interrupted(*run: object) -> None:
        exec("import signal; signal.raise_signal(signal.SIGINT)")

    monkeypatch.setattr(run_end, "explain_failure", interrupted)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            run_end.explain_run(tmp_path, Result(1), (), is_shown=True)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert caught.type is not KeyboardInterrupt


def test_refusal_is_recorded_only_in_unused_run_dir(tmp_path: Path) -> None:
    """The explanation has no secrets, and is not written into the directory of another run."""
    job = replace(JOB, report=False)

    def refuse_start() -> None:
        with (
            pytest.raises(SettingError),
            run_end.record_refusal(job, tmp_path, ["hunter2-hunter2"], is_generated=False),
        ):
            raise SettingError("no hunter2-hunter2 here", remedy="look elsewhere")

    findings = tmp_path / "findings.json"
    (tmp_path / "owner.json").write_text('{"host": "x", "pid": 4711, "since": "now"}')
    refuse_start()
    assert not findings.exists()
    (tmp_path / "owner.json").unlink()
    (tmp_path / "result.json").write_text('{"exit_code": 0}')  # from a finished run
    refuse_start()
    assert not findings.exists()
    (tmp_path / "result.json").unlink()
    refuse_start()
    (match,) = json.loads(findings.read_text())["findings"]
    assert match["check"] == "explain/not-started"
    assert match["message"] == "no [secret] here"


@pytest.mark.parametrize("planned", [False, True])
def test_refused_start_removes_generated_run_dir(tmp_path: Path, planned: bool) -> None:
    run_dir = tmp_path / "runs" / "train-1"
    run_dir.mkdir(parents=True)
    (run_dir / "hosts.json").touch()
    if planned:  # failed later: its logs may show the cause
        (run_dir / "plan.json").touch()
    with (
        pytest.raises(SettingError),
        run_end.record_refusal(replace(JOB, report=False), run_dir, [], is_generated=True),
    ):
        raise SettingError("no such interface")
    assert (run_dir / "findings.json").exists() == planned
    assert (tmp_path / "runs").exists() == planned


@pytest.mark.parametrize(
    ("nodes", "num_refusals", "suggested"),
    [
        (None, 1, "--nnodes 2:3"),
        (2, 1, "--nnodes 1:2"),
        (None, 3, ""),  # no host has answered
        (None, None, ""),  # the other hosts were not tried
        (NodeRange(2, 3), 1, ""),
    ],
)
def test_failed_login_suggests_node_range(
    nodes: NodeCount | None, num_refusals: int | None, suggested: str
) -> None:
    cluster = Cluster(tuple(map(Host, ("n1", "n2", "n3"))))
    job = replace(JOB, nnodes=Setting(nodes, Source.COMMAND_LINE))
    error = ConnectError("cannot log in to n1", remedy="n1: start it")
    error.num_refusals = num_refusals
    with pytest.raises(ConnectError) as caught, run_end.suggest_node_range(job, cluster):
        raise error
    assert caught.value.remedy.partition("answer: ")[2] == suggested


def test_explains_failure_from_logs_only(tmp_path: Path) -> None:
    """The failure is passed as an argument, so that only the logs are read."""
    text = 'Traceback (most recent call last):\n  File "/a/t.py", line 3\nValueError: boom\n'
    failed = Failure("exception", "n2", 1, headline="ValueError: boom", traceback=text)
    rank_ended = Event("rank ended", "n2", 1, fields={"code": None, "signal": 11, "peak_bytes": 0})
    explained = run_end.explain_failure(
        tmp_path, Result(1, Failure("signal", "n2", 1, signal=11)), (rank_ended,)
    )
    assert "rank 1 on n2 crashed in compiled code (SIGSEGV)" in explained
    assert (
        run_end.explain_failure(tmp_path, Result(1, failed), ()) == ""
    )  # the traceback has been shown already
    (finding,) = json.loads((tmp_path / "findings.json").read_text())["findings"]
    assert finding["message"] == "rank 1 on n2 raised ValueError: boom (t.py, line 3)"


@pytest.mark.parametrize(
    ("memory", "is_known"),
    [
        ({"kills": 0, "limit": None, "kernel": []}, True),
        ({"kills": None, "limit": None, "kernel": []}, False),
        ({}, False),
    ],
)
def test_kill_advice_depends_on_memory_evidence(memory: dict[str, object], is_known: bool) -> None:
    end = Event("rank ended", "n1", 1, fields={"code": None, "signal": 9, "memory": memory})
    match = killed.match(Evidence(events=(end,)))
    assert match is not None
    assert bool(match.remedy) == bool(match.confirm) == is_known
    assert "dmesg" not in match.remedy + match.confirm


def test_cause_ignores_attempt_before_restart() -> None:
    """The rank's log still contains the lost connection of the previous attempt."""

    def rank_ended(time: float, rank: int, code: int | None, signum: int | None = None) -> Event:
        fields = {"code": code, "signal": signum, "seen": None, "memory": None, "peak_bytes": 0}
        return Event("rank ended", f"n{rank + 1}", rank, time, fields=fields)

    def attempt_started(time: float, attempt: int) -> Event:
        return Event("started", time=time, fields={"attempt": attempt, "world_size": 2})

    closed_error = "RuntimeError: Connection closed by peer [10.0.0.1]:57252"
    logs = (
        Log("n1", 0, (closed_error, "rank 0 resuming at epoch 12")),
        Log("n2", 1, (closed_error, closed_error)),
    )
    events = (attempt_started(0, 0), rank_ended(5, 1, None, 9), rank_ended(6, 0, 1),
              attempt_started(7, 1), rank_ended(9, 0, 0), rank_ended(9.2, 1, 1))  # fmt: skip
    first = Failure("early", "n1", 0, 9.0, code=0, headline="ended with status 0")
    conclusion = conclude(Evidence(logs, Result(1, failure=first), events), load_all())
    assert conclusion.text == "rank 0 on n1 ended its work while rank 1 on n2 still waited for it"
    rule, match = conclusion.matches[0]
    assert rule.code == "uneven-data"
    assert "load the same checkpoint: save it on a disk that all hosts share" in match.remedy


def test_names_line_at_which_rank_waited() -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/home/me/fit.py", line 17, in <module>',
        "    session.save_model({})",
        '  File "/v/site-packages/paceline/train/reduce/direct.py", line 317, in move',
        "    raise RuntimeError(text)",
        "RuntimeError: Read error [10.0.0.2]:57542: Connection reset by peer",
    )
    events = tuple(
        Event("rank ended", f"n{rank + 1}", rank, time, fields={"code": code, "signal": None})
        for time, rank, code in ((5.0, 1, 0), (5.1, 0, 1))
    )
    match = uneven_data.match(Evidence((Log("n1", 0, lines),), Result(1), events))
    assert match is not None
    assert match.cause.endswith("rank 0 on n1 still waited for it at fit.py, line 17")


def test_full_disk_of_run_directory_is_cause() -> None:
    headline = (
        "cannot write to the run directory /runs/a on this machine\n"
        "  found:  No space left on device\n"
        "  remedy: Free some space there, or give --run-dir on another disk"
    )
    failure = Failure("record", "this machine", None, headline=headline)
    evidence = Evidence(result=Result(1, failure=failure), checkpoint_step=40)
    conclusion = conclude(evidence, load_all())
    assert conclusion.text == (
        "cannot write to the run directory /runs/a on this machine: No space left on device"
    )
    rule, match = conclusion.matches[0]
    assert rule.code == "run-directory"
    assert match.remedy == (
        "Free some space there, or give --run-dir on another disk. Then run again with the same"
        " `--run-dir FOLDER`: training resumes from the checkpoint of step 40."
    )


LIBRARY_ERROR = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/w/train.py", line 3, in <module>
[rank1]:     loader.load()
[rank1]:   File "/v/lib/python3.11/site-packages/loading/core.py", line 9, in load
[rank1]: RuntimeError: strange thing
[rank0]: RuntimeError: Connection closed by peer [10.0.0.1]:3
"""


def test_library_exception_does_not_blame_script() -> None:
    """The exception is shown with the script's line, and other candidates are listed."""
    evidence = from_log(LIBRARY_ERROR)
    conclusion = conclude(evidence, load_all())
    assert conclusion.text == "rank 1 raised RuntimeError: strange thing (train.py, line 3)"
    text = "\n".join(lines(conclusion, evidence))
    assert "cause:      The script called loading, which raised it." in text
    assert "also seen:\n    rank 1 ended first: rank 0 lost its connection" in text


def test_evidence_has_line_of_script_and_first_failure_is_no_consequence() -> None:
    calls = "".join(f"""\
[rank1]:   File "/v/lib/python3.11/site-packages/torch/nn/module.py", line {line}, in call
[rank1]:     return forward(input)
""" for line in range(20))  # fmt: skip
    log = f"""\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/w/train.py", line 5, in <module>
[rank1]:     main()
[rank1]:   File "/w/train.py", line 3, in main
[rank1]:     model(x)
{calls}[rank1]: RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x20 and 21x5)
"""
    conclusion = conclude(from_log(log), load_all())
    assert [rule.code for rule, _ in conclusion.matches] == ["shapes-differ", "exception"]
    evidence_lines = conclusion.matches[0][1].lines
    assert len(evidence_lines) == 12
    assert evidence_lines[:3] == (
        '  File "/w/train.py", line 3, in main', "    model(x)", "  ..."
    )  # fmt: skip
    assert evidence_lines[-1].startswith("RuntimeError: mat1 and mat2")
    assert "also seen:" not in lines(conclusion, from_log(log))


def test_error_of_paceline_in_script_keeps_its_remedy() -> None:
    log = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/w/train.py", line 3, in <module>
[rank0]:     loader = session.loader(data, global_batch=96)
[rank0]:   File "/env/lib/python3.12/site-packages/paceline/train/comms.py", line 423, in agree
[rank0]:     raise JobError(
[rank0]: paceline.spec.errors.JobError: the data set must be the same on every rank
[rank0]:   found:  rank 0 on n1: 2003 samples
[rank0]:           rank 1 on n2: 1500 samples
[rank0]:   remedy: make or split the data before session.prepare
"""
    conclusion = conclude(from_log(log), load_all())
    found = "rank 0 on n1: 2003 samples; rank 1 on n2: 1500 samples"
    assert conclusion.text == f"rank 0: the data set must be the same on every rank: {found}"
    _, match = conclusion.matches[0]
    assert match.remedy == "make or split the data before session.prepare"
    assert match.confidence == 0.9


def test_unknown_failure_shows_evidence_to_collect() -> None:
    log = "loading shards\nstep 3 loss 0.2\nsrun: error: n7: task 3: Exited with exit code 9\n"
    evidence = from_log(log)
    conclusion = conclude(evidence, load_all())
    text = "\n".join(lines(conclusion, evidence))
    assert "first failure (rank 3 on n7):\n    srun: error: n7: task 3" in text
    assert "before it:\n    loading shards" in text
    assert "to collect: " in text


def test_unrelated_message_lowers_confidence() -> None:
    name = "OSError: [Errno 28] No space left on device: '/srv/a'"
    direct = conclude(from_log(f"{name}\n"), load_all()).matches[0][1]
    report = "run.sh: line 3: 81 Killed    python t.py\n"
    indirect = conclude(from_log(f"logging failed: {name[9:]}\n{report}"), load_all()).matches[0][1]
    assert direct.confidence > indirect.confidence > 0.8


@pytest.mark.parametrize("number_of_steps", [1, 6])
@pytest.mark.parametrize(("number", "rule"), [(9, "killed"), (11, "crashed")])
def test_warning_of_peer_does_not_override_first_exit(
    number_of_steps: int, number: int, rule: str
) -> None:
    warning = "WARNING: cannot write tokenizer cache: [Errno 28] No space left on device\n"
    closed_error = (
        "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:41\n"
    )
    failure = Failure("signal", "n2", 1, signal=number)
    end = Event("rank ended", "n2", 1, fields={"signal": number, "code": None})
    log = Log.from_text("n1", 0, warning + "acc 0.1\n" * number_of_steps + closed_error)
    evidence = Evidence((log, Log("n2", 1, ("acc 0.1",))), Result(128 + number, failure), (end,))
    (first, match), *_ = conclude(evidence, load_all()).matches
    assert (first.code, match.rank) == (rule, 1)


def test_survived_labelled_warning_is_not_cause() -> None:
    lines = "".join(f"[rank{rank}]: acc 0.{step}\n" for step in range(3) for rank in (0, 1))
    warning = "[rank0]: UserWarning: cannot write cache: [Errno 28] No space left on device\n"
    end = "failed (exitcode: -9) local_rank: 1 (pid: 123) of binary: /usr/bin/python\n"
    assert conclude(from_log(warning + lines + end), load_all()).matches[0][0].code == "killed"


def test_launcher_root_cause_uses_exception_of_rank() -> None:
    """The log contains the exception of this rank only, not of the next rank in the table."""
    table = "".join(
        f"{head}:\n[{n}]:\n  host      : n2\n  rank      : {rank} (local_rank: {rank % 8})\n"
        f"  exitcode  : 1 (pid: {n})\n  error_file: <N/A>\n"
        for n, (head, rank) in enumerate([("Failures", 9), ("Root Cause (first failure)", 8)])
    )
    store = "torch.distributed.DistNetworkError: The client socket has timed out after 900000ms"
    text = f"[rank8]: {store} while trying to connect to (10.1.2.3, 29500).\n"
    ruler = "=" * 60
    log = f"{text}{ruler}\ntrain.py FAILED\n{'-' * 60}\n{table}{ruler}\n"
    conclusion = conclude(from_log(log), load_all())
    assert conclusion.text == "rank 8 on n2: the store at 10.1.2.3 port 29500 does not answer"
