"""A process that joins ranks that are training: it starts alone, and joins between two steps.

Each rank records the results of its start's operations (:class:`Recording`), and rank 0 publishes
them. The newcomer runs the script from its beginning with the same results (:class:`Replay`)
(``docs/explanation/decisions/0020-new-ranks-replay-the-start.md``). Marks divide the start into
parts: results of a part that a newcomer does not need, as it loads no checkpoint, are skipped.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.spec import jobenv
from paceline.spec.errors import JobError
from paceline.spec.failure import NEWCOMER_MISMATCH
from paceline.train.world import World, read

if TYPE_CHECKING:
    from paceline.train.elastic.recovery import Recovery

T = TypeVar("T")

SECOND_TRAINING = (
    "the script is in its second session.epochs, and a process can join in the first only"
)
"""Why no process can join. What a script does between the two follows from results that a process
of its own does not have, and they are not recorded."""
LATE_CHANGE = "the script has called session.{} after its first session.epochs had begun"
"""Why no process can join: a newcomer starts without that change."""

SOURCES = "sources"
"""Key of what :func:`sources` returned, in the description of a training."""
STORE_PREFIX = "paceline/start"
"""Prefix of the recording's keys in the rendezvous store."""
MAX_BYTES = 4 << 20
"""Largest recording; no process can join if it is larger."""
START_TIMEOUT = timedelta(minutes=30)
"""How long a newcomer waits for the others' first step."""
_PART_BYTES = 1 << 20  # of one value; a store has a limit


class Recording:
    """Records the results of the start's operations, on a rank that was there from the beginning.

    Args:
        info: What a newcomer must know before its first operation; JSON values.

    Attributes:
        obstacle: Why no process can join; empty as long as one can.
    """

    is_replay = False

    def __init__(self, inner: Recovery, info: dict[str, Any]) -> None:
        self._inner, self._info = inner, info
        self._lines: list[str] = []
        self._size, self._pauses = 0, 0
        single = "it began on one rank, which exchanges nothing that another could join"
        self.obstacle = single if info["ranks"] == 1 else ""

    def event(self, act: Callable[[], T]) -> T:
        result = self._inner.event(act)
        if not self._pauses and not self.obstacle:
            try:
                self._add(json.dumps(["gave", _encode(result)]))
            except TypeError as error:
                self.obstacle = f"an operation of the start gave {error}"
        return result

    def _add(self, line: str) -> None:
        self._size += len(line) + 1
        if self._size > MAX_BYTES:
            limit = f"{MAX_BYTES >> 20} MiB"
            self.obstacle = f"what ranks told each other at the start is more than {limit}"
            self._lines.clear()
        else:
            self._lines.append(line)

    def mark(self, name: str) -> None:
        if not self.obstacle:
            self._add(json.dumps(["mark", name]))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of operations that a newcomer skips; they are not recorded."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def publish(self, store: Any, **info: Any) -> None:
        """Writes the results of the start into a store, for processes that join later.

        Rank 0 calls it as the start ends. Nothing is written if none can join.
        """
        if not self.obstacle:
            first = json.dumps(["about", {**self._info, **info}])
            _publish("\n".join([first, *self._lines]), store)


class Replay:
    """Returns recorded results for the operations of a newcomer."""

    is_replay, obstacle = True, ""

    def __init__(self, recording: str) -> None:
        self._recording = recording
        entries = [json.loads(line) for line in recording.splitlines()]
        self.info: dict[str, Any] = entries[0][1]
        self._entries = deque(entries[1:])
        self._mark = "join"

    def event(self, act: Callable[[], T]) -> T:
        kind, content = self._entries[0] if self._entries else ("", None)
        if kind != "gave":
            raise JobError(
                NEWCOMER_MISMATCH,
                found=f"after {self._mark} they had told each other less",
                remedy="give every node the same files and the same options; a script must not do"
                " other things on some ranks, nor before the first batch of a pass that goes on in"
                " its middle than of one that begins",
            )
        self._entries.popleft()
        return _decode(content)  # type: ignore[no-any-return]

    def mark(self, name: str) -> None:
        """Skips to what was recorded after the next mark of this name."""
        self._mark = name
        while self._entries:
            if self._entries.popleft() == ["mark", name]:
                return

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield

    def publish(self, store: Any, **_: Any) -> None:
        _publish(self._recording, store)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A process that joins others.

    Attributes:
        place: One in the world that the others were when they began: never the first, which writes,
            nor one beyond that world, which no script is made for.
    """

    slot: int
    place: World
    mixed: bool
    store: Any
    start: Replay


def read_newcomer(environ: Mapping[str, str]) -> Newcomer | None:
    """Returns this process as a newcomer; ``None`` if it starts with all others.

    Raises:
        JobError: The others have not published how they began.
    """
    if environ.get(jobenv.NEWCOMER) != "1":
        return None
    slot = int(environ[jobenv.RANK])
    size = max(slot + 1, int(environ[jobenv.WORLD_SIZE]))
    address, port = environ[jobenv.MASTER_ADDR], int(environ[jobenv.MASTER_PORT])
    store = TCPStore(address, port, None, False, START_TIMEOUT, wait_for_workers=False)
    start = wait_for_start(store, START_TIMEOUT)
    plan_place = read({**environ, jobenv.WORLD_SIZE: str(size)})
    ranks = int(start.info["ranks"])
    place = replace(plan_place, rank=max(1, min(slot, ranks - 1)), size=ranks)
    os.environ.update({jobenv.RANK: str(place.rank), jobenv.WORLD_SIZE: str(ranks)})
    return Newcomer(slot, place, bool(start.info["mixed"]), store, start)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Context in which the environment describes a world of this process alone."""
    single = {jobenv.RANK: "0", jobenv.WORLD_SIZE: "1", jobenv.PLANNED_WORLD: "1"}
    former = {name: os.environ[name] for name in single if name in os.environ}
    os.environ.update({name: single[name] for name in former})
    try:
        yield
    finally:
        os.environ.update(former)


def line_of_script() -> str:
    """Returns function and line of the script that is running; empty without a script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("paceline", "tqdm"):  # a bar that is shown on one rank only
            return f"{frame.f_code.co_name}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def sources() -> dict[str, str]:
    """Returns hashes of the script and its own modules, as they are on the disk now, by name.

    Installed packages are left out: they are the same for all processes of an environment.
    """
    roots = (sysconfig.get_path("stdlib"), Path(__file__).parents[1])
    installed = tuple(f"{root}{os.sep}" for root in roots)
    hashes = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith(installed):
            continue
        path = Path(file)
        if {"site-packages", "dist-packages"}.isdisjoint(path.parts):
            with contextlib.suppress(OSError):
                hashes[name] = _hash(path)
    return hashes


def source_of(name: str) -> str | None:
    """Returns the hash of one module, imported or not; ``None`` if it has no file."""
    with contextlib.suppress(Exception):  # whatever the packages that it lies in do
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            return _hash(Path(spec.origin))
    return None


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _publish(recording: str, store: Any) -> None:
    notes = PrefixStore(STORE_PREFIX, store)
    if notes.check(["parts"]):
        return
    content = recording.encode()
    starts = range(0, len(content), _PART_BYTES)
    parts = [content[start : start + _PART_BYTES] for start in starts]
    for number, part in enumerate(parts):
        notes.set(str(number), part.decode())
    notes.set("parts", str(len(parts)))


def wait_for_start(store: Any, timeout: timedelta) -> Replay:
    """Waits for the recording that the ranks publish after their first step.

    Raises:
        JobError: They have published nothing.
    """
    notes = PrefixStore(STORE_PREFIX, store)
    try:
        notes.wait(["parts"], timeout)
    except RuntimeError as error:
        raise JobError(
            "the ranks that train have not left how they began",
            found=str(error).partition("\n")[0][:300],
        ) from None
    count = int(notes.get("parts"))
    return Replay(b"".join(notes.get(str(number)) for number in range(count)).decode())


def _encode(result: Any) -> Any:
    """Returns a result as JSON values. TypeError for a type that no operation returns."""
    if isinstance(result, Tensor):
        flat = result.detach().cpu().contiguous()
        content = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        dtype = str(flat.dtype).removeprefix("torch.")
        text = base64.b64encode(content).decode()
        return {"kind": dtype, "shape": list(flat.shape), "bytes": text}
    if isinstance(result, (list, tuple)):
        return [_encode(item) for item in result]
    if result is None or isinstance(result, (bool, int, float, str)):
        return result
    raise TypeError(type(result).__name__)


def _decode(content: Any) -> Any:
    if isinstance(content, dict):
        dtype = getattr(torch, content["kind"])
        raw = bytearray(base64.b64decode(content["bytes"]))
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(content["shape"]).clone()
    if isinstance(content, list):
        return [_decode(item) for item in content]
    return content
