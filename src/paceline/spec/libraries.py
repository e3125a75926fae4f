"""Libraries under a job that can tell what they do: how to ask them, and which lines are theirs.

NCCL (and RCCL), torch's c10d, gloo, libfabric, UCX, oneCCL and Intel MPI. Each writes into the
rank's output; by its form a line can be told from the script's.
"""

from __future__ import annotations

import re

# what makes each of them tell; a rank's own settings go before it
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
# for ranks alone: the store, which is no rank, would tell of every key
# (not DETAIL: with it DistributedDataParallel of torch 2.13 crashes, SIGSEGV, as it is built)
DEBUG_OF_RANKS = {"TORCH_DISTRIBUTED_DEBUG": "INFO"}
LOOKED_AT = 400  # characters of a line
_TORCH = r"(?:\[rank\d{1,9}\]:? ?)?\[(?P<torch>[IWEFV])\d{4} [\d:.]{1,30} [\w.-]{1,80}:\d{1,6}\]"
# torch's DistributedDataParallel tells below such a line, up to an empty one
_LIST = re.compile(rf"{_TORCH} \[Rank \d{{1,9}}\]: DDP Initialized with:")
_OF_LIST = re.compile(r"\w{1,60}: ?[^:]{0,1000}$|$")
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
_BAD = ("W", "E", "F", "WARN", "ERROR", "FATAL", "ABORT", "warn")
# libfabric warns of every provider that it does not take
_USUAL = re.compile(
    r"returned -61|env variable not set|\[c10d\] The (?:hostname of the client socket cannot be"
    r"|IPv[46] network addresses of \(localhost)|NCCL_CUMEM_ENABLE"
    r"|destroy_process_group\(\) was not called"  # torch's own wrapper for DETAIL does not
)


def level(line: str) -> str | None:
    """``told`` or ``warned`` for a line of a library's own; ``None`` for any other."""
    found = _LINE.match(line[:LOOKED_AT])
    if found is None:
        return None
    said = [value for value in found.groupdict().values() if value]
    bad = any(value in _BAD for value in said) and not _USUAL.search(line[:LOOKED_AT])
    return "warned" if bad else "told"


def opens_list(line: str) -> bool:
    """Whether lines of a library's own follow that cannot be told from others by their form."""
    return _LIST.match(line[:LOOKED_AT]) is not None


def of_list(line: str) -> bool:
    """Whether a line may stand in such a list; its last one is empty."""
    return _OF_LIST.match(line) is not None
