"""Tests filtering and summarising the log messages of communication libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.explain.evidence_reader import from_log
from paceline.explain.libraries import summarize
from paceline.launch.planning import planner
from paceline.launch.recorder import MAX_PARTIAL, LibraryFilter
from paceline.report import explanation
from paceline.spec.libraries import classify_line

FOLDER = Path(__file__).parents[1] / "fixtures" / "libraries"
SUMMARIES = {
    "nccl-socket": [
        "NCCL version: 2.14.3+cuda11.7 on node0",
        "NCCL interface: enp10s0:10.10.7.107 on node0; ens3:10.10.7.109 on node2",
        "NCCL network: Socket",
        "NCCL transport: NET/Socket on node0; P2P/IPC on node0",
        "NCCL connected: rings on node0",
        "NCCL communicator: 32 on node2",
    ],
    "nccl-h100": [
        "NCCL version: 2.28.9+cuda13.0",
        "NCCL interface: lo:127.0.0.1",
        "NCCL network: Socket",
        "NCCL devices: [0]lo:127.0.0.1<0>",
        "NCCL channels: 64 coll channels",
        "NCCL communicator: 1",
        "torch store: localhost:20019",
        "torch NCCL: 2.28.9",
    ],
    "impi": [
        "Intel MPI version: 2021.18.1",
        "Intel MPI libfabric: 2.4.0-impi",
        "Intel MPI provider: tcp",
        "libfabric interface: eth0",
    ],
    "torch-gloo": ["torch store: 127.0.0.1:23977", "gloo peers: 1"],
}


def summary_of(name: str) -> list[str]:
    return summarize(from_log((FOLDER / f"{name}.log").read_text()).debug)


@pytest.mark.parametrize("name", SUMMARIES)
def test_summarize_library_log(name: str) -> None:
    assert summary_of(name) == SUMMARIES[name]


def test_summary_starts_with_unique_warnings() -> None:
    (line,) = summary_of("nccl-warn")
    assert line.startswith("warning: rank 0 on n1: [0] misc/socket.cc:533 NCCL WARN socketPoll")
    assert line.endswith("(and 1 more like it)")
    first, version, transport = summary_of("ucx")
    assert "network device 'eth7' is not available" in first
    assert version == "UCX version: 1.13.1"
    assert transport == "UCX transport: tag(posix/memory cma/memory rc_mlx5/mlx5_1:1 cuda_ipc/cuda)"
    assert [line[:9] for line in summary_of("oneccl")] == ["warning: "] * 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("step 1 loss 2.3", None),
        ("the script speaks of libfabric: and UCX", None),
        ("[I hope] this is mine", None),
        ("libfabric:1:core:core:fi_getinfo_():1021<warn> fi_getinfo: provider usnic returned -61"
         " (No data available)", "told"),
        ("libfabric:1:core:core:ofi_x():5<warn> cannot open it", "warned"),
        ("[rank1]:[W1122 08:30:00.123 ProcessGroupNCCL.cpp:99] timed out", "warned"),
        ("[I1122 08:32:25.357729930 debug.cpp:48] [c10d] The debug level is set", "told"),
        ("[1660872656.5] [node001:41718:0]      sock.c:128  UCX  DIAG  failed to read", "told"),
    ],
)  # fmt: skip
def test_classify_line(line: str, expected: str | None) -> None:
    assert classify_line(line) == expected


def test_library_filter_handles_any_chunk_size() -> None:
    """Warnings also stay in the normal output; other library lines go to the library log only."""
    text = (
        b"".join((FOLDER / f"{name}.log").read_bytes() for name in ("ucx", "oneccl", "torch-gloo"))
        + b"no end"
    )
    for size in (1, 7, len(text)):
        library_filter, script_output, library_output = LibraryFilter(), b"", b""
        for at in range(0, len(text), size):
            script_part, library_part = library_filter.feed(text[at : at + size])
            script_output, library_output = (
                script_output + script_part,
                library_output + library_part,
            )
        script_output += library_filter.flush()
        assert b"sum 2.0\n" in script_output
        assert script_output.endswith(b"no end")
        assert script_output.count(b"UCX  WARN") == library_output.count(b"UCX  WARN") == 1
        assert b"UCX  INFO" not in script_output
        assert b"sum 2.0" not in library_output
        assert b"RuntimeError: oneCCL" in script_output


def test_filters_ddp_parameter_list() -> None:
    opening = (
        b"[rank0]:[I1122 13:28:19.733110093 logger.cpp:223] [Rank 0]: DDP Initialized with: \n"
    )
    listed = b"dtypes: float\nrank: 0\nworld_size: 2\ngloo_socket_ifname: lo\ndevice_ids: \n\n"
    own = b"rank: 0\n\nloss: 2.0\n"
    assert LibraryFilter().feed(own + opening + listed + own) == (own * 2, opening + listed)
    cut = b"Traceback (most recent call last):\n" + own
    assert LibraryFilter().feed(opening + b"rank: 0\n" + cut) == (cut, opening + b"rank: 0\n")


def test_filter_does_not_delay_unterminated_lines() -> None:
    assert LibraryFilter().feed(b"10 %\r")[0] == b"10 %\r"
    assert len(LibraryFilter().feed(b"x" * (MAX_PARTIAL + 1))[0]) == MAX_PARTIAL + 1


def test_explain_shows_library_lines() -> None:
    evidence = from_log((FOLDER / "nccl-socket.log").read_text())
    lines = explanation.library_lines(evidence)
    assert lines[:2] == ["", "the libraries said:"]
    assert explanation.library_lines(from_log("step 1\n")) == []


def test_debug_sets_library_log_levels_unless_user_did() -> None:
    from paceline.remote.network import NodeNetwork
    from paceline.spec.hosts import Host
    from paceline.spec.job import Entry, Environment, Job
    from paceline.spec.settings import Setting, Source

    debug_setting = Setting(True, Source.COMMAND_LINE)
    own = Environment({"NCCL_DEBUG": "TRACE"})
    job = Job("x", Entry("script", "a.py"), "/", "/python", environment=own, debug=debug_setting)
    facts = {"cpu": {"available": [0]}, "rdma": []}
    early_env = planner.node_env(job, Host("n1"), facts, 1, None)
    full_env = planner.node_env(job, Host("n1"), facts, 1, NodeNetwork("10.0.0.1", "eth0", "tried"))
    assert early_env["TORCH_CPP_LOG_LEVEL"].value == "INFO"  # torch reads it when loaded
    assert "TORCH_DISTRIBUTED_DEBUG" not in early_env  # the store would log every key
    # DETAIL makes DistributedDataParallel of torch 2.13 crash
    assert full_env["TORCH_DISTRIBUTED_DEBUG"].value == "INFO"
    assert full_env["FI_LOG_LEVEL"].value == full_env["UCX_LOG_LEVEL"].value == "info"
    assert "NCCL_DEBUG" not in full_env
