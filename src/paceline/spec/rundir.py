"""Names of the files in a run directory, of checkpoints, and rules for ranks' paths.

All JSON is UTF-8; ``*.jsonl`` files hold one object a line, appended.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import unicodedata
from collections.abc import Collection
from pathlib import Path

PLAN = "plan.json"  # the plan as executed, with the source of every setting
CONFIG = "config.json"  # the effective settings of the recipe
HOSTS = "hosts.json"  # facts of every host
EVENTS = "events.jsonl"  # time, host, rank, kind, details
METRICS = "metrics.jsonl"  # one line per logged global step or epoch, with its time since 1970
RESULT = "result.json"  # exit status, final metrics, first failure if any
FINDINGS = "findings.json"  # what the checks found
LOGS = "logs"  # logs/HOST/RANK.log: complete output of a rank; logs/HOST/agent.log
DEBUG = "debug"  # debug/HOST/RANK.log: with --debug, the debug output of its libraries
MODEL = "model"  # the result: model.safetensors, config.json
WEIGHTS = "model/model.safetensors"
MODEL_CONFIG = "model/config.json"
WRITER = "writer.json"  # inside checkpoints/: the current writer; never copied
SIGNATURES = ".paceline-signatures"  # of the model and the manifests of checkpoints
CHECKPOINTS = "checkpoints"  # checkpoints/STEP/: weights, state, manifest with hashes
MANIFEST = "manifest.json"  # inside each: its files with their hashes
LATEST, BEST = "latest.json", "best.json"  # pointers beside them
SELECTORS = ("auto", "never", "latest", "best")  # of a checkpoint, besides a step and a folder
MEASURED = "steps.json"  # the few steps of a run of `paceline forecast`
FORECAST = "forecast.json"  # forecast and measured times of the run
COLLECTIVES = "collectives.json"  # results of `paceline bench collectives`
REPORT = "report.html"  # the report page
FETCHED = "files"  # files/HOST/: files that ranks wrote into shipped copies of the code
OUTSIDE = "outside-project"  # files/HOST/outside-project/: those that they wrote to ``../``
OUTPUTS = "outputs.jsonl"  # files that scripts wrote below the project: see rundir/outputs.py
KEY = ".paceline-key"  # identifies the folder on nodes without a shared disk
RANKS = "ranks.json"  # while it runs: state of the ranks, and the straggler
STACKS = "stacks"  # stacks/TIME.txt: stacks of all ranks, on request
DETACHED = "detached.json"  # location of the supervisor of a detached run
SCREEN = "screen.txt"  # of such a run: the output of its launcher
BATCH = "batch.json"  # scheduler and job id of a batch
OWNER = "owner.json"  # the launcher in this folder: host, pid, start time
DISK_RESERVE = ".paceline-room"  # while it runs: space reserved for its end on a full disk
PROBE = ".paceline-probe"  # shows a node whether it sees this folder
CALL = "call"  # a function and its arguments, pickled, while it runs
RETURN_VALUES = "returned"  # returned/RANK: what it returned or raised, pickled
FETCHED_LIST = ".paceline-brought"  # files that came from nodes, one a line: see rundir/arrivals.py
NAMED_PATHS = ".paceline-named"  # data and weights that may be sent: see rundir/named_paths.py
DEFAULT_PARENT = "runs"

# Written by the launcher only, and never copied from a node.
LAUNCHER_FILES = {PLAN, EVENTS, METRICS, HOSTS, RESULT, LOGS, DEBUG, OWNER, FINDINGS, CHECKPOINTS,
        FETCHED, RANKS, STACKS, REPORT, CALL, RETURN_VALUES, FORECAST, DETACHED, SCREEN, BATCH,
        OUTPUTS, "index.html"}  # fmt: skip

# Written by recipes and by paceline.train, on whichever node has rank 0.
PRODUCTS = {CONFIG, MEASURED, COLLECTIVES}
_MODEL_SUFFIXES = (".json", ".safetensors", ".txt", ".model")


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory; not if it belongs to others and cannot be read."""
    with contextlib.suppress(PermissionError):
        is_marked = any((folder / name).exists() for name in (KEY, PROBE, FETCHED_LIST))
        return is_marked or ((folder / EVENTS).exists() and (folder / RESULT).exists())
    return False


def replaced_files(folder: Path) -> list[str]:
    """The files that a first run in this folder would replace; none if a run was there before.

    A project's own ``config.json`` or ``model`` is not replaced: see ``rundir/arrivals.py``.
    """
    present = {path.name for path in folder.iterdir()}
    if is_run(folder) or present & {EVENTS, METRICS, OWNER, CHECKPOINTS, FETCHED_LIST, DETACHED}:
        return []
    replaced = {PLAN, HOSTS, RESULT, FINDINGS, REPORT, "index.html"}
    if all(name in {MODEL, *PRODUCTS} or is_launcher_file(name) for name in present):
        replaced |= PRODUCTS | {MODEL}  # nothing says that it is a project
    return sorted(present & replaced)


def run_entries(folder: Path) -> list[Path]:
    """The entries of a folder under names that a run uses, in order."""
    products = {MODEL, *PRODUCTS}
    entries = sorted(folder.iterdir())
    return [path for path in entries if path.name in products or is_launcher_file(path.name)]


def safe_name(name: str) -> str:
    """A host's name as a folder's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "_"


def log_file(host: str, source: int | str) -> str:
    """Relative path of a log: of a rank, or ``agent`` for ssh and the agent."""
    return f"{LOGS}/{safe_name(host)}/{source}.log"


def debug_file(host: str, rank: int) -> str:
    """Relative path of the debug output of a rank's libraries."""
    return f"{DEBUG}/{safe_name(host)}/{rank}.log"


def rank_of_log(log: Path) -> int | None:
    """The rank of a log file; ``None`` for an agent's."""
    is_rank = log.stem.isascii() and log.stem.isdecimal() and len(log.stem) < 10
    return int(log.stem) if is_rank else None


def backup_name(file: Path) -> Path:
    """The path to which an earlier run's ``.jsonl`` file is moved."""
    return file.with_name(f"{file.stem}-before-{time.strftime('%Y%m%d-%H%M%S')}{file.suffix}")


Version = tuple[int, int]
"""A checkpoint's writer token and step; the largest is the newest.

Each new writer in a folder of checkpoints gets a larger token. So its checkpoints are newer than
those of an earlier writer, at any step, even if that one still writes.
"""

_CHECKPOINT_NAME = re.compile(r"(0|[1-9][0-9]{0,14})(?:\.([1-9][0-9]{0,5}))?")
_NUMERIC_NAME = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)
_FIRST_TOKEN = 1  # of a folder's first writer
MAX_TOKEN, MAX_STEP = 10**6 - 1, 10**15 - 1  # more starts and steps than any run has


def checkpoint_name(version: Version) -> str:
    """The folder name of a checkpoint: ``STEP`` for the first writer, ``STEP.TOKEN`` for others.

    Raises:
        ValueError: :func:`parse_version` would not accept the numbers.
    """
    token, step = version
    if not (0 <= step <= MAX_STEP and token <= MAX_TOKEN):
        raise ValueError(f"no checkpoint has step {step} of writer {token}")
    return str(step) if token <= _FIRST_TOKEN else f"{step}.{token}"


def parse_version(name: str) -> Version | None:
    """Parses the folder name of a checkpoint; ``None`` for any other name."""
    match = _CHECKPOINT_NAME.fullmatch(name)
    if match is None or match[2] == str(_FIRST_TOKEN):
        return None
    return int(match[2] or _FIRST_TOKEN), int(match[1])


def resembles_checkpoint(name: str) -> bool:
    """Whether a name resembles a checkpoint's but is none: no run writes such numbers."""
    return parse_version(name) is None and _NUMERIC_NAME.fullmatch(name) is not None


def expired(
    versions: Collection[Version], keep: int, protected: Collection[Version | None]
) -> list[Version]:
    """All but the newest ``keep`` versions and the protected ones; none if ``keep`` is 0."""
    if not keep:
        return []
    return [v for v in sorted(versions, reverse=True)[keep:] if v not in protected]


_MAX_POINTER_BYTES = 4096  # bytes


def read_pointer(path: Path) -> str:
    """The name of the checkpoint in a pointer file; empty if there is none."""
    with contextlib.suppress(
        OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError
    ):
        if not path.is_file() or path.stat().st_size > _MAX_POINTER_BYTES:
            return ""  # reading a pipe would block
        pointer = json.loads(path.read_text())
        return str(pointer.get("checkpoint") or int(pointer["step"]))
    return ""


def frozen_file(sha256: str) -> str:
    """The name of a checkpoint's file of frozen weights, by its content."""
    return f"frozen-{sha256[:16]}.safetensors"


def is_frozen_file(name: str) -> bool:
    """Whether a name is one of :func:`frozen_file`: equal names have equal content."""
    return _FROZEN.fullmatch(name) is not None


_FROZEN = re.compile(r"frozen-[0-9a-f]{16}\.safetensors")


def checkpoints(folder: Path) -> list[Path]:
    """The folders of a run's checkpoints that have a manifest, newest first."""
    with contextlib.suppress(OSError):
        versions = [(parse_version(path.name), path) for path in (folder / CHECKPOINTS).iterdir()]
        complete = [(v, path) for v, path in versions if v and (path / MANIFEST).is_file()]
        return [path for _, path in sorted(complete, reverse=True)]
    return []


def is_product(path: str) -> bool:
    """Whether a path in the run directory belongs to a model or is a result file."""
    folder, _, name = path.rpartition("/")
    return path in PRODUCTS or (folder == MODEL and name.endswith(_MODEL_SUFFIXES))


def is_launcher_file(path: str) -> bool:
    """Whether a path in the run directory belongs to the launcher, checkpoints included.

    Names are compared without case and invisible characters, as some file systems do.
    """
    first = unicodedata.normalize("NFKC", path.split("/")[0]).casefold()
    first = "".join(char for char in first if unicodedata.category(char) != "Cf")
    return first in LAUNCHER_FILES or first.startswith(
        (".paceline", "events-before-", "files-before-", "metrics-before-")
    )


def is_reserved(path: str) -> bool:
    """Whether ranks may not write a path in the run directory.

    Hidden files are reserved because programs read some on their own: .envrc, .netrc, .bashrc.
    """
    return bool(reserved_reason(path)) or is_fetched_separately(path)


def is_fetched_separately(path: str) -> bool:
    """Whether a path in a node's run folder is not fetched with the other results."""
    return path.split("/")[0] in (CHECKPOINTS, CALL, RETURN_VALUES) or path.startswith(".paceline")


def is_growing(path: str) -> bool:
    """Whether a file of a run directory is only appended to."""
    return path in (EVENTS, METRICS, SCREEN) or path.split("/")[0] in (LOGS, DEBUG)


def is_backup(path: str) -> bool:
    """Whether a path holds files of an earlier start, which a later one has moved aside."""
    return is_launcher_file(path) and "-before-" in path.split("/")[0]


def reserved_reason(path: str) -> str:
    """Why ranks may not write a path in the run directory; empty if they may."""
    if is_launcher_file(path):
        return "a name that the run itself uses"
    return "a hidden file" if path.startswith(".") else ""
