"""Every file that a run leaves: its name and its format.

The run directory is the interface between launching, training, diagnosing and reporting.
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
DEBUG = "debug"  # debug/HOST/RANK.log: with --debug, what its libraries tell of themselves
MODEL = "model"  # the result: model.safetensors, config.json
WEIGHTS = "model/model.safetensors"
MODEL_CONFIG = "model/config.json"
WRITER = "writer.json"  # inside checkpoints/: who writes there; it never leaves its disk
CHECKPOINTS = "checkpoints"  # checkpoints/STEP/: weights, state, manifest with hashes
MANIFEST = "manifest.json"  # inside each: its files with their hashes
LATEST, BEST = "latest.json", "best.json"  # beside them, for people: which is which
MEASURED = "steps.json"  # the few steps of a run of `paceline forecast`
FORECAST = "forecast.json"  # what was forecast for the run, beside what came
COLLECTIVES = "collectives.json"  # what `paceline bench collectives` measured
REPORT = "report.html"  # all of the above as a page to look at
FETCHED = "files"  # files/HOST/: what ranks wrote into shipped copies of the code
KEY = ".paceline-key"  # names the folder on nodes that do not see it
RANKS = "ranks.json"  # while it runs: who is where, and who holds the others up
STACKS = "stacks"  # stacks/TIME.txt: where all ranks stood when somebody asked
DETACHED = "detached.json"  # where the run goes on without the command that started it
SCREEN = "screen.txt"  # of such a run: what an attached launcher would have shown
BATCH = "batch.json"  # of a batch: which job of which scheduler it is
OWNER = "owner.json"  # who runs in this folder: launcher's host, pid, start time
ROOM = ".paceline-room"  # while it runs: bytes in which its end finds room on a full disk
PROBE = ".paceline-probe"  # by which a node finds out whether it sees this very folder
CALL = "call"  # of a function: it and its arguments, while it runs; pickled
RETURNED = "returned"  # returned/RANK: what it returned or raised there; pickled
BROUGHT = ".paceline-brought"  # which files came from nodes, one a line: see rundir/arrivals.py
DEFAULT_PARENT = "runs"

# Written by the launcher alone, and never taken from a node.
OURS = {PLAN, EVENTS, METRICS, HOSTS, RESULT, LOGS, DEBUG, OWNER, FINDINGS, CHECKPOINTS,
        FETCHED, RANKS, STACKS, REPORT, CALL, RETURNED, FORECAST, DETACHED, SCREEN, BATCH,
        "index.html"}  # fmt: skip

# Written by recipes and by paceline.train, on whichever node has rank 0.
PRODUCTS = {CONFIG, MEASURED, COLLECTIVES}
_OF_A_MODEL = (".json", ".safetensors", ".txt", ".model")


def is_run(folder: Path) -> bool:
    """Whether a folder is the run directory of a run, under way or over."""
    marked = any((folder / name).exists() for name in (KEY, PROBE))
    return marked or ((folder / EVENTS).exists() and (folder / RESULT).exists())


def safe(name: str) -> str:
    """A host's name as a folder's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "_"


def log_file(host: str, who: int | str) -> str:
    """Name of a log inside the run directory: of a rank, or ``agent``: of ssh and the agent."""
    return f"{LOGS}/{safe(host)}/{who}.log"


def debug_file(host: str, rank: int) -> str:
    """Name of the file with what a rank's libraries tell of themselves."""
    return f"{DEBUG}/{safe(host)}/{rank}.log"


def rank_of(log: Path) -> int | None:
    """The rank whose log it is; ``None`` for an agent's."""
    named = log.stem.isascii() and log.stem.isdecimal() and len(log.stem) < 10
    return int(log.stem) if named else None


def aside(file: Path) -> Path:
    """The name under which an earlier run's ``.jsonl`` file is kept."""
    return file.with_name(f"{file.stem}-before-{time.strftime('%Y%m%d-%H%M%S')}{file.suffix}")


Version = tuple[int, int]
"""Of a checkpoint: its writer's token, then its step. The largest is the newest.

Whoever begins to write into a folder of checkpoints gets a token that is larger than all before.
So what a new writer makes is newer than what a former one has left, or leaves late, at any step.
"""

_NAMED = re.compile(r"(0|[1-9][0-9]{0,14})(?:\.([1-9][0-9]{0,5}))?")
_LIKE_ONE = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)
_FIRST = 1  # the token of a folder's first writer
MOST_TOKEN, MOST_STEP = 10**6 - 1, 10**15 - 1  # more starts and steps than any run has


def checkpoint_name(version: Version) -> str:
    """The name of a checkpoint's folder: ``STEP`` of the first writer, ``STEP.TOKEN`` of others.

    ValueError for numbers that :func:`version_of` would not read again.
    """
    token, step = version
    if not (0 <= step <= MOST_STEP and token <= MOST_TOKEN):
        raise ValueError(f"no checkpoint has step {step} of writer {token}")
    return str(step) if token <= _FIRST else f"{step}.{token}"


def version_of(name: str) -> Version | None:
    """Of a checkpoint, by the name of its folder; ``None`` for what is none."""
    found = _NAMED.fullmatch(name)
    if found is None or found[2] == str(_FIRST):
        return None
    return int(found[2] or _FIRST), int(found[1])


def is_like_checkpoint(name: str) -> bool:
    """Whether a folder is named like a checkpoint, and is none: no run writes such numbers."""
    return version_of(name) is None and _LIKE_ONE.fullmatch(name) is not None


def surplus(
    found: Collection[Version], keep: int, protected: Collection[Version | None]
) -> list[Version]:
    """Which go: all but the newest ``keep`` and the protected ones; ``keep`` 0 keeps all."""
    if not keep:
        return []
    return [one for one in sorted(found, reverse=True)[keep:] if one not in protected]


_MOST_OF_POINTER = 4096  # bytes


def pointed(path: Path) -> str:
    """The name of the checkpoint that a pointer names; empty where it names none."""
    with contextlib.suppress(
        OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError
    ):
        if not path.is_file() or path.stat().st_size > _MOST_OF_POINTER:
            return ""  # a pipe would keep us waiting
        said = json.loads(path.read_text())
        return str(said.get("checkpoint") or int(said["step"]))
    return ""


def frozen_file(sha256: str) -> str:
    """The file of a checkpoint that holds weights which are not trained, named by its content."""
    return f"frozen-{sha256[:16]}.safetensors"


def is_frozen_file(name: str) -> bool:
    """Whether the file of this name in one checkpoint serves for the same name in another."""
    return _FROZEN.fullmatch(name) is not None


_FROZEN = re.compile(r"frozen-[0-9a-f]{16}\.safetensors")


def unfinished(folder: Path) -> Path | None:
    """The checkpoint to use of a run without a finished model: the best, else the newest."""
    complete, root = checkpoints(folder), folder / CHECKPOINTS
    best = root / pointed(root / BEST)
    return best if best in complete else next(iter(complete), None)


def checkpoints(folder: Path) -> list[Path]:
    """A run's complete checkpoints by their manifests, which are not looked into; newest first."""
    with contextlib.suppress(OSError):
        found = [(version_of(one.name), one) for one in (folder / CHECKPOINTS).iterdir()]
        complete = [(v, one) for v, one in found if v and (one / MANIFEST).is_file()]
        return [one for _, one in sorted(complete, reverse=True)]
    return []


def used(folder: Path) -> tuple[str, ...]:
    """What of a run is needed to use its model: the model, or else the checkpoint to use."""
    found = None if (folder / MODEL_CONFIG).is_file() else unfinished(folder)
    best = f"{CHECKPOINTS}/{BEST}"
    # a tokenizer lies with the model from the beginning
    return (MODEL,) if found is None else (MODEL, f"{CHECKPOINTS}/{found.name}", best)


def is_product(path: str) -> bool:
    """Whether a path in the run directory is of a model, or another file that paceline writes."""
    folder, _, name = path.rpartition("/")
    return path in PRODUCTS or (folder == MODEL and name.endswith(_OF_A_MODEL))


def is_ours(path: str) -> bool:
    """Whether a path in the run directory belongs to the launcher.

    Checkpoints do too: they are brought by their own way. The names are compared as a file system
    does that takes PLAN.JSON for plan.json, and sees no invisible characters.
    """
    first = unicodedata.normalize("NFKC", path.split("/")[0]).casefold()
    first = "".join(one for one in first if unicodedata.category(one) != "Cf")
    return first in OURS or first.startswith((".paceline", "events-before-", "metrics-before-"))


def is_reserved(path: str) -> bool:
    """Whether a rank may not write a path in the run directory: ours, and hidden files.

    Programs read hidden files by themselves: .envrc, .netrc, .bashrc.
    """
    return bool(why_reserved(path)) or is_brought_apart(path)


def is_brought_apart(path: str) -> bool:
    """Whether a path in a node's own run folder is ours, and comes home in another way or not."""
    return path.split("/")[0] in (CHECKPOINTS, CALL, RETURNED) or path.startswith(".paceline")


def why_reserved(path: str) -> str:
    """Why a rank may not write a path in the run directory; empty if it may."""
    if is_ours(path):
        return "a name that the run itself uses"
    return "a hidden file" if path.startswith(".") else ""
