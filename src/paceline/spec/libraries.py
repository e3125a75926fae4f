"""Debug output of the libraries under a job: its variables, and the recognition of its lines.

For NCCL (and RCCL), torch's c10d, gloo, libfabric, UCX, oneCCL and Intel MPI. Each writes into the
rank's output; the form of a line distinguishes it from the script's.
"""

from __future__ import annotations

import re

# turns the output on; a rank's own settings take precedence
DEBUG = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "GLOO_LOG_LEVEL": "INFO",
    "UCX_LOG_LEVEL": "info",
    "FI_LOG_LEVEL": "info",
    "CCL_LOG_LEVEL": "info",
    "I_MPI_DEBUG": "5",
}
# for ranks only: the store would log every key
# (not DETAIL, with which DistributedDataParallel of torch 2.13 crashes: SIGSEGV)
DEBUG_OF_RANKS = {"TORCH_DISTRIBUTED_DEBUG": "INFO"}
MAX_PREFIX = 400  # characters of a line
_TORCH = r"(?:\[rank\d{1,9}\]:? ?)?\[(?P<torch>[IWEFV])\d{4} [\d:.]{1,30} [\w.-]{1,80}:\d{1,6}\]"
# torch's DistributedDataParallel prints a list below such a line, up to an empty line
_LIST = re.compile(rf"{_TORCH} \[Rank \d{{1,9}}\]: DDP Initialized with:")
_LIST_ITEM = re.compile(r"\w{1,60}: ?[^:]{0,1000}$|$")
_LINE = re.compile(
    rf"^(?:{_TORCH}|"
    r"libfabric:\d+:.{0,200}?<(?P<fabric>\w{1,10})>|"
    r"\[\d+\.\d+\] \[[^\]]{1,100}\] {1,20}\S{1,80}:\d{1,6} {1,10}UCX {1,5}(?P<ucx>[A-Z]{1,8})|"
    r"(?:\[\d{1,9}\] )?MPI startup\(\): |"
    r"\[\S{0,200}gloo/\S{1,200}:\d{1,6}\] (?P<gloo>[A-Z]{1,8})|"
    r"\d{4}:\d\d:\d\d-\d\d:\d\d:\d\d:\( ?\d{1,9}\) \|CCL_(?P<ccl>[A-Z]{1,8})\||"
    r" ?Avg (?:for|back)ward (?:compute|comm\.|comm/comp overlap) time: \d{1,20} ?$|"
    r".{0,250}?\bNCCL (?P<nccl>INFO|WARN|TRACE|CALL|ABORT|version)\b)"
)
_WARNINGS = ("W", "E", "F", "WARN", "ERROR", "FATAL", "ABORT", "warn")
# libfabric warns of every provider that it does not use
_HARMLESS = re.compile(
    r"returned -61|env variable not set|\[c10d\] The (?:hostname of the client socket cannot be"
    r"|IPv[46] network addresses of \(localhost)|NCCL_CUMEM_ENABLE"
    r"|destroy_process_group\(\) was not called"  # torch's own wrapper for DETAIL does not
)


def classify_line(line: str) -> str | None:
    """``told`` or ``warned`` for a library's line; ``None`` for any other."""
    match = _LINE.match(line[:MAX_PREFIX])
    if match is None:
        return None
    is_warning = any(value in _WARNINGS for value in match.groupdict().values())
    return "warned" if is_warning and not _HARMLESS.search(line[:MAX_PREFIX]) else "told"


def starts_list(line: str) -> bool:
    """Whether a library's list follows, whose lines have no form of their own."""
    return _LIST.match(line[:MAX_PREFIX]) is not None


def is_list_item(line: str) -> bool:
    """Whether a line may belong to such a list; its last line is empty."""
    return _LIST_ITEM.match(line) is not None
