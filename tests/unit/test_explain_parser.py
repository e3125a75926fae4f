"""Tests parsing logs of any origin: line prefixes, failure messages and exit reports."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.explain import evidence_reader
from paceline.explain.evidence_reader import from_log, read_log, read_named
from paceline.explain.exit_reports import parse_exit
from paceline.explain.outcome import Outcome
from paceline.explain.prefixes import strip_prefixes
from paceline.explain.unit_parser import parse_units
from paceline.explain.units import Exit
from paceline.spec.errors import DataError

TRACEBACK = """\
Traceback (most recent call last):
  File "/w/train.py", line 9, in main
    table["names"]
KeyError: 'names'"""
STEPS = "\n".join(f"epoch 0 step {step} loss {2 - step / 9:.2f}" for step in range(4))
NESTINGS: dict[str, tuple[Callable[[str], str], str, int | None]] = {
    "nothing": (lambda line: line, "", None),
    "paceline": (lambda line: f"[n2/3] {line}", "n2", 3),
    "torch": (lambda line: f"[rank3]: {line}", "", 3),
    "tee and torch": (lambda line: f"[default1]:[rank3]: {line}", "", 3),
    "pdsh": (lambda line: f"10.0.0.2: {line}", "10.0.0.2", None),
    "pdsh and torch": (lambda line: f"10.0.0.2: [rank3]: {line}", "10.0.0.2", 3),
    "srun": (lambda line: f" 3: {line}", "", 3),
    "mpirun": (lambda line: f"[1,3]<stderr>: {line}", "", 3),
    "mpiexec": (lambda line: f"[3] {line}", "", 3),
    "compose": (lambda line: f"trainer-2  | {line}", "trainer-2", None),
    "kubectl": (lambda line: f"[pod/job-worker-1/main] {line}", "job-worker-1", None),
    "stern": (lambda line: f"job-worker-1 main {line}", "job-worker-1", None),
    "ray": (lambda line: f"(Worker pid=71, ip=10.0.0.2) {line}", "10.0.0.2", None),
    "time": (lambda line: f"2026-11-26T10:00:01.123Z {line}", "", None),
    "time and compose": (lambda line: f"trainer-2 | 2026-11-26 10:00:01,123 {line}", "trainer-2",
                         None),
    "runtime": (lambda line: f"2026-11-26T10:00:01.123456789Z stderr F {line}", "", None),
    "journal": (lambda line: f"Nov 26 10:00:01 n2 train.sh[71]: {line}", "n2", None),
    "json": (lambda line: json.dumps({"log": f"{line}\n", "stream": "stderr"}), "", None),
    "unknown": (lambda line: f"<<7 core.py:700>> {line}", "", None),
    "unknown and torch": (lambda line: f"<<7 core.py:700>> [rank3]: {line}", "", 3),
    "stream": (lambda line: f"stderr: {line}", "", None),
}  # fmt: skip


def outcome(text: str) -> Outcome:
    return from_log(text).outcome


@pytest.mark.parametrize("nesting", NESTINGS)
def test_prefixed_blank_lines_keep_exception_chain(nesting: str) -> None:
    prefix, *_ = NESTINGS[nesting]
    chain = f"{TRACEBACK}\n\nThe above exception was the direct cause:\n\n{TRACEBACK}\n"
    (failure,) = outcome("\n".join(map(prefix, chain.split("\n")))).failures
    assert len(failure.errors) == 2


@pytest.mark.parametrize("label", ["INFO [gpu-3/train]", "(pod-1/main)"])
def test_label_with_path_is_prefix(label: str) -> None:
    lines = strip_prefixes([f"2026-11-26 10:00:01,123 {label} {line}" for line in "abc"])
    assert [line.text for line in lines] == ["a", "b", "c"]


def test_lines_starting_with_rank_belong_to_rank() -> None:
    """MPICH's launcher adds no labels, so a rank's traceback is mixed with lines of other ranks."""
    steps = [f"rank {rank} step {step} loss 0.5" for step in range(9) for rank in (0, 1)]
    text = "\n".join([*steps[:6], TRACEBACK, *steps[6::2]])
    assert [unit.text for unit in outcome(text).failures] == ["KeyError: 'names'"]


@pytest.mark.parametrize("report", [
    "srun: error: n1: task 3: Segmentation fault (core dumped)",
    "srun: error: n1: task 3: Exited with exit code 1",
])  # fmt: skip
def test_surviving_ranks_do_not_hide_exit_report(report: str) -> None:
    steps = [f"{rank}: step {step} loss 0.5" for step in range(9) for rank in range(4)]
    alive = [line for line in steps[16:] if not line.startswith("3")]
    assert outcome("\n".join([*steps[:16], report, *alive])).failures
    assert not outcome("\n".join([*steps[:16], report, *steps[16:]])).failures


def test_kernel_messages_belong_to_host() -> None:
    xid = "kernel: [100.30] NVRM: Xid (PCI:0000:b3:00): 94, pid=4412, Contained: SM (0x1)"
    steps = [f"gpu-{host} | step {step} loss 0.5" for step in range(9) for host in "ab"]
    peer_lines = [f"gpu-b | {line}" for line in TRACEBACK.splitlines()]
    log = [*steps[:6], f"gpu-b | {xid}", *peer_lines, *steps[6::2]]
    assert [unit.kind for unit in outcome("\n".join(log)).context] == ["kernel"]
    assert not outcome("\n".join([*steps[:6], f"gpu-b | {xid}", *steps[6:]])).has_failed


def test_recovered_link_is_not_reported() -> None:
    down = "Jun 01 03:10:31 cn7 kernel: mlx5_core 0000:5e:00.0 ib0: Link down\n"
    (failure,) = outcome(down).context
    assert failure.host == "cn7"
    assert outcome(down.replace("cn7", "cn8") + down).context
    assert not outcome(down + down.replace("down", "up")).context


def test_watchdog_abort_follows_from_timeout() -> None:
    watchdog = (
        "[rank1]:[E1122 06:40:01.6 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective"
        " operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=600000) ran for"
        " 600079 milliseconds before timing out.\n"
    )
    end = "failed (exitcode: -6) local_rank: 1 (pid: 222) of binary: /usr/bin/python3"
    assert not outcome(f"{watchdog}{end}").failures
    assert outcome(end).failures


@pytest.mark.parametrize("nesting", NESTINGS)
def test_strips_nested_prefixes(nesting: str) -> None:
    prefix, host, rank = NESTINGS[nesting]
    lines = strip_prefixes([prefix(line) for line in f"{STEPS}\n{TRACEBACK}".splitlines()])
    assert [line.text for line in lines][4:] == TRACEBACK.splitlines()
    assert {(line.host, line.rank) for line in lines} == {(host, rank)}


@pytest.mark.parametrize("record", [
    {"message": "training failed", "exc_info": TRACEBACK},
    {"message": "training failed", "error": {"stack_trace": TRACEBACK}},
    {"message": "training failed", "error.stack_trace": TRACEBACK},
    {"message": f"training failed\n{TRACEBACK}"},
])  # fmt: skip
def test_parses_traceback_in_json_record(record: object) -> None:
    lines = [*(json.dumps({"message": line}) for line in STEPS.splitlines()), json.dumps(record)]
    (unit,) = outcome("\n".join(lines)).failures
    assert unit.error is not None
    assert unit.error.type == "KeyError"
    assert unit.error.is_in_script


def test_rejects_named_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.log")
    with pytest.raises(DataError, match="is a named pipe"):
        read_named(tmp_path / "pipe.log")


def test_reads_pipe_of_shell() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"KeyError: 'names'\n")
    os.close(write_end)
    try:
        assert read_named(Path(f"/proc/self/fd/{read_end}")) == "KeyError: 'names'\n"
    finally:
        os.close(read_end)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
@pytest.mark.parametrize("size", [0, evidence_reader.TAIL_BYTES])
def test_reads_logs_in_utf16_and_utf8_with_bom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, size: int
) -> None:
    """PowerShell writes UTF-16. Only the beginning and the end of a long log are read."""
    monkeypatch.setattr(evidence_reader, "STREAM_HEAD_BYTES", 1 << 10)
    monkeypatch.setattr(evidence_reader, "STREAM_TAIL_BYTES", 1 << 12)
    file = tmp_path / "a.log"
    file.write_bytes(("ready\n" * (size // 4) + TRACEBACK).encode(encoding))
    for text in (read_named(file), read_log(file)):
        assert text.startswith("ready" if size else "Traceback")
        (unit,) = outcome(text).failures
        assert unit.text == "KeyError: 'names'"


@pytest.mark.parametrize("text", [
    "loss: 0.3\nloss: 0.2\nloss: 0.1\nloss: 0.1",
    "epoch 1: done\nepoch 2: done\nepoch 3: done",
    "WARNING: a\nError: b\nNote: c",
    "[ 812.123456] a\n[ 812.123457] b\n[ 812.123458] c",
])  # fmt: skip
def test_ordinary_text_has_no_prefix(text: str) -> None:
    assert [line.text for line in strip_prefixes(text.splitlines())] == text.splitlines()


def test_unprefixed_lines_continue_prefixed_message() -> None:
    text = (
        "[rank1]:[E1104 17:40:34.2 ProcessGroupNCCL.cpp:612] [Rank 1] NCCL error: remote\n"
        "ncclRemoteError: A call failed\nLast error:\nsocketProgress: Connection closed\n"
        "Exception raised from x (most recent call first):\nframe #0: c10::Error (0x1 in /x.so)\n"
    )
    assert {line.rank for line in strip_prefixes(text.splitlines())} == {1}
    (unit,) = outcome(text).consequences
    assert unit.text.splitlines()[-2] == "socketProgress: Connection closed"
    assert "frame #0" not in unit.text


def test_exception_chain_is_single_unit() -> None:
    text = (
        f"{TRACEBACK}\n\nThe above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "/w/train.py", line 3, in <module>\n'
        "    main()\nRuntimeError: no table\n"
    )
    (unit,) = parse_units(text.splitlines())
    assert [error.type for error in unit.errors] == ["KeyError", "RuntimeError"]
    assert unit.text == "KeyError: 'names'\nRuntimeError: no table"


def test_exception_message_spans_several_lines() -> None:
    message = (
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 802"
    )
    text = TRACEBACK.replace("KeyError: 'names'", message)
    unit, step = parse_units([*text.splitlines(), "step 3 loss 0.2"])
    assert unit.text == message
    assert step.kind == "progress"


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("failed (exitcode: -9) local_rank: 1 (pid: 12) of binary: python", Exit(signal=9)),
        ("srun: error: n7: tasks 4-5: Exited with exit code 2", Exit("n7", 4, 2)),
        ("srun: error: n7: task 3: Out Of Memory", Exit("n7", 3, is_memory=True)),
        ("mpirun noticed that process rank 2 with PID 1 on node n7 exited on signal 11 (x).",
         Exit("n7", 2, signal=11)),
        ("pdsh@head: n7: ssh exited with exit code 255", Exit("n7", code=255)),
        ("trainer-1 exited with code 137", Exit("trainer-1", signal=9)),
        ("trainer-1 exited with code 0", None),
        ("process 2 terminated with signal SIGKILL", Exit(rank=2, signal=9)),
        ("run.sh: line 3: 81560 Killed    python train.py", Exit(signal=9)),
        ("  Exit code:    7", Exit(code=7)),
        ("slurmstepd-n7: error: Detected 1 oom_kill event in StepId=4.0.", Exit(is_memory=True)),
        ("paceline: failed first: rank 1 on n7: killed by SIGKILL (somebody's kill -9)",
         Exit("n7", 1, signal=9)),
        ("the old worker was killed", None),
        ("exit codes are listed below", None),
    ],
)  # fmt: skip
def test_parses_exit_reports(line: str, end: Exit | None) -> None:
    assert parse_exit(line) == end


def test_launcher_table_gives_host_of_rank() -> None:
    text = (
        f"{TRACEBACK}\n====\nt.py FAILED\n----\nRoot Cause (first observed failure):\n[0]:\n"
        "  host      : n7\n  rank      : 12 (local_rank: 4)\n  exitcode  : 1 (pid: 4)\n====\n"
    )
    first = outcome(text).first
    assert first is not None
    assert first.label == "rank 12 on n7"


def test_separates_failure_from_consequences() -> None:
    lost = TRACEBACK.replace("KeyError: 'names'", "RuntimeError: Connection closed by peer [::1]:5")
    ranks = {0: lost, 3: TRACEBACK, 1: lost}
    text = "\n".join(f"[rank{rank}]: {line}" for rank in ranks for line in ranks[rank].splitlines())
    result = outcome(text)
    assert [unit.rank for unit in result.failures] == [3]
    assert [unit.rank for unit in result.consequences] == [0, 1]


@pytest.mark.parametrize("text", [
    STEPS,
    f"{TRACEBACK}\n{STEPS}",
    f"ERROR loader: cannot read a.jpg\n{TRACEBACK}\nskipped a.jpg",
    f"Exception ignored in: <function f at 0x7f>\n{TRACEBACK}",
    f"--- Logging error ---\n{TRACEBACK}\nCall stack:\n  File \"t.py\", line 3, in <module>\n"
    "    log.info('x')\nMessage: 'x'\nArguments: ()",
    f"test accuracy 0.93\nError in atexit._run_exitfuncs:\n{TRACEBACK}",
    "test accuracy 0.93\nTraceback (most recent call last):\n  File \"/usr/lib/python3.10/"
    "multiprocessing/resource_tracker.py\", line 209, in main\n    cache[rtype].remove(name)\n"
    "KeyError: '/mp-abc'",
    f"Training finished\nException in thread Thread-3 (_pin_memory_loop):\n{TRACEBACK}",
    f"[W1101 08:00:01.1 socket.cpp:767] [c10d] cannot be retrieved (gai error: -2)\n{STEPS}",
    f"{TRACEBACK}\nno names, skipped\nscored the rest\nwrote a table",
    f"{STEPS}\n{TRACEBACK}\nW0601 10:11:18.2 910 torch/agent/server/api.py:879] [default] Worker"
    f" group FAILED. 1/1 attempts left; will restart worker group\n{STEPS}\nI0601 10:31:18.3 910"
    " torch/agent/server/api.py:895] [default] worker group successfully finished. Waiting 300"
    " seconds for other agents to finish.",
    "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,1 @@\n-killed by signal 9\n \n"
    " RuntimeError: CUDA out of memory\n",
    "commit 5fd1e1cc0b (HEAD -> main)\nAuthor: A <a@b>\n\n    Fix a rank killed by signal 9\n",
    f"{TRACEBACK}\nnames not found, using numbers\nfinal acc 0.9",
    "".join(f"worker-0 | {line}\nworker-1 | ok\n" for line in [*TRACEBACK.splitlines(), "no names"])
    + "worker-0 exited with code 0\nworker-1 exited with code 0",
    "RuntimeError: CUDA out of memory (caught), retrying\n" + STEPS,
    f"===== test session starts =====\n{TRACEBACK}\n===== 1 failed in 0.1s =====",
    f"F   [100%]\n{TRACEBACK}\nFAILED test_a.py::test_b - KeyError: 'names'\n1 failed in 0.1s",
    f"test_a ... {TRACEBACK}\nok\nRan 2 tests in 0.003s\n\nOK",
    "b.c: In function 'main':\nb.c:4:60: warning: format '%s' expects argument of type 'char *'\n"
    "    4 |   puts(\"killed by signal 9\");",
    f"commit {'0a' * 20} (HEAD -> main)\nAuthor: A <a@b>\n\n    Fix a rank killed by signal 9\n",
    "[main 1a2b3c4] Fix a rank killed by signal 9\n 1 file changed",
    'E1127 20:03:12.034600   10667 memcache.go:265] "Unhandled Error" err="connection refused"',
    "bash: line 1: nvidia-smi: command not found\nLinux n1 6.1.0\n8 CPUs",
    TRACEBACK.replace("/w/train.py", "/v/site-packages/flask/app.py"),
    f"{STEPS}\nsaved model.pt\n[rank1]:[W1101 09:31:03.2 TCPStore.cpp:125] [c10d] recvValue failed:"
    " Connection reset by peer",
    "text: \"RuntimeError: CUDA out of memory\" -> oom\ntext: \"killed by signal 9\" -> crash",
    "\"Segmentation fault (core dumped)\", crash\n\"CUDA error: an illegal memory access\", gpu",
    '{"text": "RuntimeError: CUDA out of memory", "label": "oom"}\nwrote 1 row',
])  # fmt: skip
def test_survived_errors_are_no_failure(text: str) -> None:
    assert not outcome(text).has_failed


JOURNAL = """\
Jun 01 03:00:01 nas systemd[1]: Started backup.service - Nightly backup.
Jun 01 03:00:02 nas borg[551]: Traceback (most recent call last):
Jun 01 03:00:02 nas borg[551]:   File "/usr/bin/borg", line 4690, in main
Jun 01 03:00:02 nas borg[551]: OSError: [Errno 28] No space left on device: '/backup/data/0/17'
Jun 01 03:00:02 nas systemd[1]: backup.service: Failed with result 'exit-code'.
"""


@pytest.mark.parametrize("text", [
    JOURNAL,
    '2026-06-01 10:00:01.120 CET [4] ERROR:  could not extend file "base/2": No space left on'
    " device\n2026-06-01 10:00:01.130 CET [1] LOG:  server process (PID 4) was terminated by"
    " signal 9: Killed\n",
    "ERROR 06-01 11:01:01 [serving.py:116] Traceback (most recent call last):\n"
    'ERROR 06-01 11:01:01 [serving.py:116]   File "/v/serving.py", line 301, in _validate\n'
    "ERROR 06-01 11:01:01 [serving.py:116] ValueError: the context is too long\n"
    'INFO:     127.0.0.1:40112 - "POST /v1/completions HTTP/1.1" 400 Bad Request\n'
    'INFO:     127.0.0.1:40114 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    "INFO 06-01 11:02:11 [loggers.py:111] Engine 000: Avg prompt throughput: 10.1 tokens/s\n",
])  # fmt: skip
def test_errors_of_unrelated_programs_are_no_failure(text: str) -> None:
    assert outcome(text).first is None


def test_reads_job_in_system_journal() -> None:
    for program in ("python3", "job.sh"):
        log = JOURNAL.replace("borg[", f"{program}[").replace("17", "loss")
        (failure,) = outcome(log).failures
        assert failure.text.startswith("OSError")


def test_message_includes_trailing_list() -> None:
    log = TRACEBACK.replace("'names'", "no match.") + "\ntensor at 8:\nsaved: 2\nrecomputed: 3\n"
    (failure,) = outcome(log).failures
    assert failure.text.endswith("recomputed: 3")


def test_wandb_summary_is_no_progress() -> None:
    summary = ["Run summary:", " accuracy 0.93", "View run at: https://x", "Synced 5 files"]
    text = "\n".join(f"wandb: {line}" for line in summary)
    assert [unit.text for unit in outcome(f"{TRACEBACK}\n{text}").failures] == ["KeyError: 'names'"]


def test_failed_service_is_failure_despite_live_peer() -> None:
    lines = "".join(f"worker-0 | {line}\nworker-1 | ok\n" for line in TRACEBACK.splitlines())
    text = f"{lines}worker-0 exited with code 1\nworker-1 exited with code 0"
    first = outcome(text).first
    assert first is not None
    assert (first.host, first.text) == ("worker-0", "KeyError: 'names'")


@pytest.mark.parametrize("line", [
    "train_loss=0.5 val_loss=nan", "val loss nan", "Validation: loss nan (sanity check)",
    '{"eval_loss": NaN, "step": 3}',
])  # fmt: skip
def test_nan_in_validation_is_no_failure(line: str) -> None:
    assert not outcome(f"Epoch 1 {line}\nTraining finished").has_failed


def test_unlabelled_context_gets_rank_of_failure() -> None:
    log = "UserWarning: CUDA unknown error\n" + "\n".join(
        f"[rank3]: {x}" for x in TRACEBACK.split("\n")
    )
    (warning,) = outcome(log.replace("KeyError", "RuntimeError")).context
    assert warning.rank == 3


@pytest.mark.parametrize("line", ["val_loss=nan loss=nan", "train loss: nan", "loss is nan"])
def test_nan_training_loss_is_failure(line: str) -> None:
    assert outcome(f"{STEPS}\nEpoch 1 {line}\nsaved model.pt").has_failed


def test_thread_exception_fails_job_without_progress() -> None:
    thread = f"Exception in thread Thread-3 (load):\n{TRACEBACK}"
    assert outcome(f"{STEPS}\n{thread}").has_failed
    assert not outcome(f"{STEPS}\n{thread}\nstep 9 loss 0.1").has_failed


def test_exit_report_outweighs_progress() -> None:
    report = "srun: error: n7: task 3: Exited with exit code 1"
    assert outcome(f"{TRACEBACK}\n{STEPS}\n{report}").failures[0].kind == "traceback"


@pytest.mark.parametrize("line", [
    "3 failed ranks in 12.3 s", "1 error in 12.5 s", "1 failed, 0 succeeded in 3.4 s",
    "12 failed downloads, retried in 3 s",
])  # fmt: skip
def test_failure_count_is_no_test_report(line: str) -> None:
    (unit,) = outcome(f"{TRACEBACK}\n{line}").failures
    assert unit.error is not None
    assert unit.error.type == "KeyError"


TIMEOUT = (
    "[E301 10:00:00.1 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation"
    " timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE) ran for 600011 milliseconds before timing out."
)


@pytest.mark.parametrize("text", [
    f"[rank0]: step 100\n[rank0]: Saved checkpoint 100.pt\n[rank1]:{TIMEOUT}",
    f"Loading annotations into memory...\nDone (t=0.72s)\nepoch 1\n{TIMEOUT}",
    f"epoch 1\nsaved model.pt\n{TIMEOUT}",
    "Done (t=0.72s)\nn3:201:300 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to"
    " 10.0.0.4<41234> failed : Connection timed out",
    "[rank0]: Saved checkpoint 100.pt\n[rank1]: step 100\n[rank1]:[E301 10:00:00.1 x.cpp:616] "
    "NET/IB : Got completion from peer with status=12 error",
])  # fmt: skip
def test_checkpoint_message_does_not_hide_failure(text: str) -> None:
    assert outcome(text).has_failed


def test_library_errors_at_shutdown_are_no_failure() -> None:
    end = "[E301 10:00:00.1 TCPStore.cpp:125] [c10d] recvValue failed: Connection reset by peer"
    assert not outcome(f"{STEPS}\nTraining finished\n[rank1]:{end}\n[rank2]:{end}").has_failed
    assert not outcome(f"[rank1]: epoch 1\n[rank1]: saved a.pt\n[rank1]:{end}").has_failed


def test_open_mpi_message_names_exited_rank() -> None:
    text = (
        f"{STEPS}\n{'-' * 60}\nmpirun detected that one or more processes exited with non-zero "
        "status, thus causing\nthe job to be terminated. The first process to do so was:\n\n"
        f"  Process name: [[20640,1],3]\n  Exit code:    7\n{'-' * 60}\n"
    )
    assert outcome(text).exits == (Exit(rank=3, code=7),)


def test_parses_mpi_message_without_rulers() -> None:
    box = "mpirun was unable to start\nthe program\n\nNode:       gpu2\nExecutable: /v/python\n"
    (message,) = outcome(f"{STEPS}\n{box}next\n").context
    assert (message.host, message.lines[-1]) == ("gpu2", "Executable: /v/python")


def test_compiler_error_explains_build_failure() -> None:
    compiler = "a.cpp:1:10: fatal error: Python.h: No such file or directory\n"
    built = outcome(f"{compiler}[rank1]: RuntimeError: Error building extension 'ext'\n")
    assert [(unit.rank, unit.text) for unit in built.context] == [(1, compiler.strip())]
    assert not outcome(f"{compiler}[rank1]: RuntimeError: shapes\n").context


def test_interrupted_traceback_is_consequence() -> None:
    truncated = TRACEBACK.rpartition("\n")[0]
    stopped = f"{truncated}\nKeyboardInterrupt\n"
    result = outcome(f"{truncated}\n{stopped}")
    assert not result.failures
    assert [unit.text for unit in result.consequences] == ["KeyboardInterrupt"]


@pytest.mark.parametrize("ruler", ["", "-" * 74 + "\n"])
def test_parses_two_line_report_of_open_mpi_5(ruler: str) -> None:
    report = (
        "prterun noticed that process rank 5 with PID 636815 on node fl98 exited on\n"
        "signal 11 (Segmentation fault).\n"
    )
    (unit,) = outcome(f"{ruler}{report}{ruler}").failures
    assert unit.exits == (Exit("fl98", 5, signal=11),)


def test_open_mpi_stack_is_crash() -> None:
    text = (
        "[fl98:636815] *** Process received signal ***\n"
        "[fl98:636815] Signal: Segmentation fault (11)\n"
        "[fl98:636815] [ 0] /lib64/libpthread.so.0(+0x12cf0)[0x7f11c3e2bcf0]\n"
        "[fl98:636815] *** End of error message ***\n"
    )
    (unit,) = outcome(f"step 1 loss 2.1\n{text}").failures
    assert (unit.kind, unit.host, len(unit.lines)) == ("crash", "fl98", 4)


def test_kill_messages_of_launcher_are_no_progress() -> None:
    killed = [f"[INFO] [launch.py:315:sigkill_handler] Killing subprocess {n}" for n in range(8)]
    (unit, *_) = outcome("\n".join([TRACEBACK, " 4%| 17/387 [05:25]", *killed])).failures
    assert unit.text == "KeyError: 'names'"
    report = (
        "mpirun detected that one or more processes exited with non-zero status, thus causing\n"
        "the job to be terminated. The first process to do so was:\n\n"
        "  Process name: [[2281,1],2]\n  Exit code:    1\n"
    )
    warning = "n1:9:9 [0] init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and rank 0\n"
    (unit,) = outcome(f"{warning}{report}").failures
    assert unit.exits == (Exit("", 2, 1),)
    assert outcome(f"{warning}{report}").context


def test_traceback_in_generated_text_is_no_failure() -> None:
    speed = "generated 2 samples in 3.1 s (812 tokens/s)"
    assert not outcome(f"sample 1: It prints\n{TRACEBACK}\nUse get('names').\n{speed}\n").failures


REPORT = """\
# [BUG] training fails

## Describe the bug

Training fails at once with `KeyError`, see below.

## To Reproduce

```bash
torchrun --nproc-per-node 2 train.py
```

## Logs

```text
{log}
```
"""


def test_reads_pasted_log_of_bug_report() -> None:
    log = "\n".join([STEPS, *(f"[rank1]: {line}" for line in TRACEBACK.splitlines())])
    (failure,) = outcome(REPORT.format(log=log)).failures
    assert (failure.rank, failure.text) == (1, "KeyError: 'names'")
    assert not outcome(REPORT.format(log=STEPS)).has_failed
    assert not outcome(REPORT.format(log=f"{log}\n```\nor\n```\n{log}")).has_failed
    manual = REPORT.replace("Describe the bug", "Keys").replace("To Reproduce", "Example")
    assert not outcome(manual.format(log=log)).has_failed


def test_pdsh_prefix_of_single_line_names_host() -> None:
    lines = strip_prefixes([*STEPS.splitlines(), "n2: bash: a: No such file or directory",
                            "pdsh@n1: n2: ssh exited with exit code 127"])  # fmt: skip
    assert [(line.host, line.text) for line in lines[4:]] == [
        ("n2", "bash: a: No such file or directory"),
        ("", "pdsh@n1: n2: ssh exited with exit code 127"),
    ]


def test_unknown_label_may_contain_rank() -> None:
    steps = [f"pod-{rank} step {step} loss 2.1" for step in range(4) for rank in (0, 1)]
    error = "pod-1 [rank9]: RuntimeError: CUDA error"
    assert strip_prefixes([*steps, error])[-1].rank == 9
    texts = [f"a{rank}f [rank={rank}] || {line}" for rank in (4, 5) for line in
             TRACEBACK.splitlines()]  # fmt: skip
    assert [line.rank for line in strip_prefixes(["start", *texts])[1::4]] == [4, 5]


def test_ray_error_names_node_of_actor() -> None:
    text = (
        "ray.exceptions.ActorDiedError: The actor died.\n\tpid: 7\n\tip: 10.29.214.5\nIt is dead."
    )
    (failure,) = outcome(text).failures
    assert failure.host == "10.29.214.5"


def test_ddp_check_without_peer_is_consequence() -> None:
    check = "RuntimeError: DDP expects same model across all ranks, but Rank 5 has 8 params"
    absent = f"[rank5]: {check}, while rank 0 has inconsistent 0 params."
    result = outcome(f"{absent}\n[rank0]: KeyError: 'names'")
    assert [unit.rank for unit in result.failures] == [0]
    assert [unit.rank for unit in result.consequences] == [5]
    inconsistent = absent.replace("inconsistent 0", "inconsistent 9")
    assert [unit.rank for unit in outcome(inconsistent).failures] == [5]
