"""A process that comes to ranks that are training: it starts alone, and joins between two steps.

It runs the script from its beginning, as the others did. What they told each other until their
first step decided how each of them began (settings that were compared, who makes what, lengths of
messages), so each keeps what the operations of its start gave (:class:`Recording`), and the first
of them leaves that in the rendezvous store. The newcomer is given the same answers
(:class:`Replay`), has nobody to wait for, and comes to the same place: the door of the training,
where the others let it in.

Marks divide the start into parts: a part of which a newcomer needs less than the others did (it
loads no checkpoint) leaves the rest of its answers unused.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.spec import jobenv
from paceline.spec.errors import JobError
from paceline.spec.failure import NEWCOMER_MISMATCH
from paceline.train.comms import Mender
from paceline.train.world import World, read

T = TypeVar("T")

LATER = "the script is in its second session.epochs, and a process can join in the first only"
"""Why nobody can join. What a script does between the two follows from results that a process of
its own does not have, and its answers are not kept."""
AFTER = "the script has called session.{} after its first session.epochs had begun"
"""The same: who comes starts with what there was before."""

SOURCES = "sources"
"""What :func:`sources` found is left under this name."""

WHERE = "paceline/start"
"""Prefix of its keys in the rendezvous store."""
MOST = 4 << 20
"""Bytes of all answers; beyond that nobody can join."""
PATIENCE = timedelta(minutes=30)
"""How long a newcomer waits for the others' first step."""
_PART = 1 << 20  # bytes of one value; a store has a limit


class Recording:
    """Keeps what the operations of the start gave, on a rank that was there from the beginning.

    Args:
        inner: Carries them out.
        about: What a newcomer has to know before its first operation; JSON values.

    Attributes:
        why: Why nobody can join; empty as long as somebody can.
    """

    def __init__(self, inner: Mender, about: dict[str, Any]) -> None:
        self._inner, self._about = inner, about
        self._lines: list[str] = []
        self._size, self._paused = 0, 0
        alone = "it began on one rank, which exchanges nothing that another could join"
        self.why = alone if about["ranks"] == 1 else ""

    @property
    def stale(self) -> bool:
        return self._inner.stale

    @property
    def able(self) -> bool:
        return self._inner.able

    def watched(self) -> AbstractContextManager[None]:
        return self._inner.watched()

    def patient(self, longest: timedelta) -> AbstractContextManager[None]:
        return self._inner.patient(longest)

    def event(self, act: Callable[[], T]) -> T:
        result = self._inner.event(act)
        if not self._paused and not self.why:
            self._keep(result)
        return result

    def _keep(self, result: Any) -> None:
        try:
            self._add(json.dumps(["gave", _encoded(result)]))
        except TypeError as error:
            self.why = f"an operation of the start gave {error}"

    def _add(self, line: str) -> None:
        self._size += len(line) + 1
        if self._size > MOST:
            self.why = f"what ranks told each other at the start is more than {MOST >> 20} MiB"
            self._lines.clear()
        else:
            self._lines.append(line)

    def mark(self, name: str) -> None:
        """The start has come to a place that has this name."""
        if not self.why:
            self._add(json.dumps(["mark", name]))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it a newcomer does nothing, so nothing is kept."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def leave(self, store: Any, **about: Any) -> None:
        """Leaves everything in a store where it is not there yet; by one rank.

        Args:
            store: Of the job, without a prefix.
            about: More that a newcomer has to know, as JSON values.
        """
        if not self.why:
            first = json.dumps(["about", {**self._about, **about}])
            _leave("\n".join([first, *self._lines]), store)


class Replay:
    """Gives the answers of the others' start to a newcomer's operations.

    Args:
        lines: What :class:`Recording` has left.

    Attributes:
        about: What it was given with them.
    """

    stale, able, why = False, False, ""

    def __init__(self, lines: str) -> None:
        self._lines = lines
        said = [json.loads(line) for line in lines.splitlines()]
        self.about: dict[str, Any] = said[0][1]
        self._left = deque(said[1:])
        self._after = "join"

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def patient(self, longest: timedelta) -> AbstractContextManager[None]:
        return nullcontext()

    def event(self, act: Callable[[], T]) -> T:
        kind, content = self._left[0] if self._left else ("", None)
        if kind != "gave":
            raise JobError(
                NEWCOMER_MISMATCH,
                found=f"after {self._after} they had told each other less",
                remedy="give every node the same files and the same options; a script must not do"
                " other things on some ranks, nor before the first batch of a pass that goes on in"
                " its middle than of one that begins",
            )
        self._left.popleft()
        return _decoded(content)  # type: ignore[no-any-return]

    def mark(self, name: str) -> None:
        """Goes on with what was told after the next mark of this name."""
        self._after = name
        while self._left:
            if self._left.popleft() == ["mark", name]:
                return

    @contextmanager
    def paused(self) -> Iterator[None]:
        """As :meth:`Recording.paused`."""
        yield

    def leave(self, store: Any, **_: Any) -> None:
        """Leaves what it was given in another store."""
        _leave(self._lines, store)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What a process is that comes to others.

    Attributes:
        slot: Number of this process in the plan.
        place: One in the world that the others were when they began: never the first, which writes,
            nor one beyond that world, which no script is made for.
        mixed: The ranks compute on different kinds of devices.
        store: Of the job.
        start: The others'.
    """

    slot: int
    place: World
    mixed: bool
    store: Any
    start: Replay


def comes(environ: Mapping[str, str]) -> Newcomer | None:
    """This process as a newcomer; ``None`` where it begins with all others.

    Raises:
        JobError: The others have not left how they began.
    """
    if environ.get(jobenv.NEWCOMER) != "1":
        return None
    slot = int(environ[jobenv.RANK])
    size = max(slot + 1, int(environ[jobenv.WORLD_SIZE]))
    address, port = environ[jobenv.MASTER_ADDR], int(environ[jobenv.MASTER_PORT])
    store = TCPStore(address, port, None, False, PATIENCE, wait_for_workers=False)
    start = waited_for(store, PATIENCE)
    own = read({**environ, jobenv.WORLD_SIZE: str(size)})
    ranks = int(start.about["ranks"])
    place = replace(own, rank=max(1, min(slot, ranks - 1)), size=ranks)
    os.environ.update({jobenv.RANK: str(place.rank), jobenv.WORLD_SIZE: str(ranks)})
    return Newcomer(slot, place, bool(start.about["mixed"]), store, start)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Within it the planned world is this process alone: whoever asserts it finds it so."""
    alone = {jobenv.RANK: "0", jobenv.WORLD_SIZE: "1", jobenv.PLANNED_WORLD: "1"}
    before = {name: os.environ[name] for name in alone if name in os.environ}
    os.environ.update({name: alone[name] for name in before})
    try:
        yield
    finally:
        os.environ.update(before)


def line_of_script() -> str:
    """The function and the line of the script that are executed now; empty where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("paceline", "tqdm"):  # a bar that is shown on one rank only
            return f"{frame.f_code.co_name}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def sources() -> dict[str, str]:
    """A hash of the script and of each of its own modules, as they lie on the disk now, by name.

    Not of what is installed, which is the same for all processes of an environment.
    """
    installed = tuple(
        f"{one}{os.sep}" for one in (sysconfig.get_path("stdlib"), Path(__file__).parents[1])
    )
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith(installed):
            continue
        path = Path(file)
        if {"site-packages", "dist-packages"}.isdisjoint(path.parts):
            with contextlib.suppress(OSError):
                found[name] = _hash(path)
    return found


def source_of(name: str) -> str | None:
    """The same hash of a module that need not be imported yet; ``None`` where none is found."""
    with contextlib.suppress(Exception):  # whatever the packages that it lies in do
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            return _hash(Path(spec.origin))
    return None


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _leave(lines: str, store: Any) -> None:
    notes = PrefixStore(WHERE, store)
    if notes.check(["parts"]):
        return
    content = lines.encode()
    parts = [content[start : start + _PART] for start in range(0, len(content), _PART)]
    for number, part in enumerate(parts):
        notes.set(str(number), part.decode())
    notes.set("parts", str(len(parts)))


def waited_for(store: Any, timeout: timedelta) -> Replay:
    """What the others have left in the store, as soon as they have trained their first step.

    Raises:
        JobError: They have left nothing.
    """
    notes = PrefixStore(WHERE, store)
    try:
        notes.wait(["parts"], timeout)
    except RuntimeError as error:
        raise JobError(
            "the ranks that train have not left how they began",
            found=str(error).partition("\n")[0][:300],
        ) from None
    count = int(notes.get("parts"))
    return Replay(b"".join(notes.get(str(number)) for number in range(count)).decode())


def _encoded(result: Any) -> Any:
    """A result as JSON. TypeError for what is none of those that operations give."""
    if isinstance(result, Tensor):
        flat = result.detach().cpu().contiguous()
        raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        kind = str(flat.dtype).removeprefix("torch.")
        return {"kind": kind, "shape": list(flat.shape), "bytes": base64.b64encode(raw).decode()}
    if isinstance(result, (list, tuple)):
        return [_encoded(one) for one in result]
    if result is None or isinstance(result, (bool, int, float, str)):
        return result
    raise TypeError(type(result).__name__)


def _decoded(content: Any) -> Any:
    if isinstance(content, dict):
        kind = getattr(torch, content["kind"])
        raw = bytearray(base64.b64decode(content["bytes"]))
        flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
        return flat.reshape(content["shape"]).clone()
    if isinstance(content, list):
        return [_decoded(one) for one in content]
    return content
