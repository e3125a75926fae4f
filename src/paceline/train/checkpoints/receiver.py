"""Where copies of checkpoints arrive: a thread of one rank of a host that is not rank 0's.

It takes a checkpoint from who knows the job's key, piece by piece onto the disk, and gives it its
name when every file has the hash that the manifest tells. What a connection that ended has left is
kept for the next one that offers the same checkpoint. A writer whose token is older than what
is there is refused, as it is on its own disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.spec.rundir import is_frozen_file, parse_version
from paceline.train import files
from paceline.train.checkpoints.format import MANIFEST, Damaged, Entry, Manifest, parse_manifest
from paceline.train.checkpoints.store import Fenced, Store
from paceline.train.reduce.handshakes import Caller, greetings, guard, job_hosts, read_exactly

PIECE = 1 << 18  # bytes after which the writer waits for a sign
GOOD, BAD = b"+", b"-"  # the sign
SPARE = 16 << 20  # bytes of a disk that copies leave free

_PART, _OFFER = ".copy.tmp", ".offer"  # a folder that is half there; in it, the manifest of it all
_NONCE, _MAC = 16, 32
_LONGEST = 1 << 24  # bytes of a message: a manifest of thousands of files
_GREETING_S = 5.0
_PATIENCE_S = 60.0
_END_S = 1.0  # for a writer to notice that nothing more is taken


class Refused(Exception):
    """The other side does not take it, or not from us; the text says why."""


class Talk:
    """A connection on which each message is proven to come from who knows the key, in order.

    What is between messages (the content of files) is proven by the hashes in the manifest. It
    begins with a nonce of the side that was called, and a nonce and a proof of the caller's.

    Args:
        connection: Closed by its owner.
        key: Of the job.
        hello: The nonce of the side that was called.
        nonce: The caller's.
        calls: This is the caller's side.

    Raises:
        OSError: By all methods: the connection ends, or nothing comes.
        Refused: By ``hear``: the other side does not know the key.
    """

    def __init__(
        self, connection: socket.socket, key: bytes, hello: bytes, nonce: bytes, *, calls: bool
    ) -> None:
        self.connection = connection
        connection.settimeout(_PATIENCE_S)
        self._key = hmac.digest(key, b"paceline checkpoints" + nonce + hello, "sha256")
        self._mine, self._theirs = (b"c", b"s") if calls else (b"s", b"c")
        self._said = self._heard = 0

    @classmethod
    def called(cls, connection: socket.socket, key: bytes) -> Talk:
        """The caller's side, which greets."""
        until = time.monotonic() + _GREETING_S
        hello, nonce = read_exactly(connection, _NONCE, until), secrets.token_bytes(_NONCE)
        talk = cls(connection, key, hello, nonce, calls=True)
        connection.sendall(nonce + talk._proof())
        return talk

    @classmethod
    def answered(cls, caller: Caller, key: bytes) -> Talk | None:
        """The other side; ``None`` where the caller does not know the key."""
        nonce, proof = bytes(caller.greeting[:_NONCE]), bytes(caller.greeting[_NONCE:])
        talk = cls(caller.connection, key, caller.hello, nonce, calls=False)
        return talk if hmac.compare_digest(proof, talk._proof()) else None

    def _proof(self) -> bytes:
        return hmac.digest(self._key, b"greeting", "sha256")

    def say(self, **message: Any) -> None:
        body = json.dumps(message).encode()
        mac = self._mac(self._mine, self._said, body)
        self._said += 1
        self.connection.sendall(len(body).to_bytes(4, "big") + mac + body)

    def hear(self) -> dict[str, Any]:
        length = int.from_bytes(self.exactly(4), "big")
        if length > _LONGEST:
            raise Refused("this is no message of ours")
        mac = self.exactly(_MAC)
        body = self.exactly(length)
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._heard, body)):
            raise Refused("it does not know this job's key")
        self._heard += 1
        message = json.loads(body)
        if problem := message.get("problem"):
            raise Refused(str(problem))
        return dict(message)

    def exactly(self, count: int) -> bytes:
        """So many bytes."""
        return read_exactly(self.connection, count, time.monotonic() + _PATIENCE_S)

    def _mac(self, side: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, side + number.to_bytes(8, "big") + body, "sha256")


class Receiver:
    """Takes copies into this host's folder of checkpoints, until it is closed.

    Args:
        root: The folder.
        key: Of the job.
        address: Of this host, as the others reach it.

    Attributes:
        place: Address and port.
        token: The largest that this rank has heard of.
    """

    def __init__(self, root: Path, key: bytes, address: str) -> None:
        self._root, self._key = root, key
        self.token = 0
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=4)
        self._guard = guard(self._listener)
        self.place: tuple[str, int] = self._listener.getsockname()[:2]
        self._open, self._taking = True, threading.Lock()
        self._serves: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="paceline-copies", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False when its socket was cut, as a rank's sockets are that is to leave a collective."""
        return self._thread.is_alive()

    def admit(self) -> None:
        """Takes the calls of the job's hosts as they are now."""
        hosts = job_hosts()
        if self._guard is not None and hosts is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._guard.admit(self._listener, hosts)

    def drop(self) -> None:
        """Hears no more of who sends now, which may be lost: whoever comes next is served."""
        if self._serves is not None:
            with contextlib.suppress(OSError):
                self._serves.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Takes nothing more; what is half there goes."""
        self._open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_END_S)

    def _clear(self, but: Path | None = None) -> None:
        """Removes what was left half there."""
        for left in self._root.glob(f".*{_PART}"):
            if left != but:
                shutil.rmtree(left, ignore_errors=True)

    def _serve(self) -> None:
        callers = greetings(
            self._listener, _NONCE + _MAC, _GREETING_S, hello=lambda: secrets.token_bytes(_NONCE)
        )
        with self._listener, contextlib.suppress(OSError), contextlib.closing(callers):
            for caller in callers:
                talk = Talk.answered(caller, self._key)
                if talk is None:
                    caller.connection.close()
                    continue
                self.drop()  # who proves itself now is the only one that still writes
                self._serves = caller.connection
                threading.Thread(
                    target=self._serve_writer, args=(talk,), name="paceline-copy", daemon=True
                ).start()
        if not self._open:
            with self._taking:
                self._clear()

    def _serve_writer(self, talk: Talk) -> None:
        # whatever is wrong with one, the next is served
        with talk.connection, self._taking, contextlib.suppress(OSError, ValueError, Refused):
            self._receive(talk)

    def _receive(self, talk: Talk) -> None:
        offer = talk.hear()
        try:
            answer = self._take(talk, offer)
        except (Refused, Damaged, Fenced, OSError, ValueError, KeyError, TypeError) as problem:
            talk.say(problem=_said(problem))
        else:
            talk.say(**answer)

    def _take(self, talk: Talk, offer: Mapping[str, Any]) -> dict[str, bool]:
        """A checkpoint that is offered, with the pruning after it."""
        raw = str(offer["manifest"]).encode()
        name, manifest = str(offer["name"]), parse_manifest(raw)
        version, store = parse_version(name), Store(self._root, int(offer["token"]))
        if version is None or version[1] != manifest.step or version[0] > store.token:
            raise Refused(f"{name[:100]!r} is no name of this checkpoint")
        if store.token < self.token:
            raise Refused("another writer has taken over")
        store.stand()
        with contextlib.suppress(OSError):
            if files.read_small(self._root / name / MANIFEST) == raw:
                return {"here": True}
        self._root.mkdir(parents=True, exist_ok=True)
        made = self._root / f".{name}{_PART}"
        self._clear(but=made)
        have = _begun(made, raw, manifest)
        shared = _shared(store, made, manifest)
        coming = {name: entry for name, entry in manifest.files.items() if name not in shared}
        have = {name: size for name, size in have.items() if name in coming}
        needed = sum(entry.bytes for entry in coming.values()) - sum(have.values())
        free = shutil.disk_usage(self._root).free
        if free < needed + SPARE:
            shutil.rmtree(made, ignore_errors=True)
            room = (
                f"{needed / 1e6:.1f} MB needed besides the {SPARE / 1e6:.0f} MB that copies leave,"
                f" {free / 1e6:.1f} MB free"
            )
            raise Refused(f"the disk of {self._root} is too full: {room}")
        goes_on = False
        try:
            talk.say(send=True, have=have, shared=[*shared])
            _write(talk, made, coming, have, lambda: self._open)
            for name, path in shared.items():
                path.rename(made / name)
            (made / _OFFER).rename(made / MANIFEST)
            store.stand()
            store.place(made, version, best=manifest.about.get("best") is True)
        except (ConnectionError, TimeoutError):
            goes_on = self._open  # there is a new group, or the writer is lost
            raise
        finally:
            if not goes_on:
                shutil.rmtree(made, ignore_errors=True)
        store.prune(int(offer["keep"]))
        return {"taken": True}


def _begun(made: Path, raw: bytes, manifest: Manifest) -> dict[str, int]:
    """Begins a folder for a copy, or finds what an earlier try has left: bytes by file.

    Of a file that is there the last byte is missing at least: its sender has something to send.
    """
    with contextlib.suppress(OSError):
        if (made / _OFFER).read_bytes() == raw:
            have = {}
            for name, entry in manifest.files.items():
                path = made / name
                if path.is_file() and (size := min(path.stat().st_size, entry.bytes - 1)) > 0:
                    os.truncate(path, size)
                    have[name] = size
            return have
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    (made / _OFFER).write_bytes(raw)
    return {}


def _shared(store: Store, made: Path, manifest: Manifest) -> dict[str, Path]:
    """Frozen weights that an earlier checkpoint here has, too: links to them, by file.

    Under another name until all has come, for what is half there is cut and written to.
    """
    found = {}
    for name, entry in manifest.files.items():
        path = made / f".{name}"
        if is_frozen_file(name) and (path.exists() or store.link(name, entry, path)):
            found[name] = path
    return found


def _said(problem: BaseException) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror
    return str(getattr(problem, "message", problem))[:300] or type(problem).__name__


def _write(talk: Talk, folder: Path, coming: Mapping[str, Entry], have: Mapping[str, int],
           wanted: Callable[[], bool]) -> None:  # fmt: skip
    """The files' contents as they come; with each piece the writer gets a sign."""
    try:
        for name, entry in sorted(coming.items()):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            digest, left = hashlib.sha256(), entry.bytes - have.get(name, 0)
            if name in have:
                with path.open("rb") as file:
                    while piece := file.read(PIECE):
                        digest.update(piece)
            with path.open("ab" if name in have else "wb", buffering=0) as file:
                while left:
                    piece = talk.exactly(min(left, PIECE))
                    if not wanted():
                        raise Refused("this rank is leaving")
                    rest = memoryview(piece)
                    while rest:
                        rest = rest[file.write(rest) :]
                    digest.update(piece)
                    left -= len(piece)
                    if left:
                        talk.connection.sendall(GOOD)
                os.fsync(file.fileno())
            if digest.hexdigest() != entry.sha256:
                raise Refused(f"{name} did not arrive as it was written (its hash differs)")
            if entry.bytes:
                talk.connection.sendall(GOOD)
        for parent in {(folder / name).parent for name in coming}:
            files.sync_folder(parent)
    except (OSError, Refused):
        with contextlib.suppress(OSError):
            talk.connection.sendall(BAD)
        raise


def send(
    talk: Talk,
    store: Store,
    name: str,
    keep: int,
    rest: Callable[[float], None],
) -> int:
    """Offers a checkpoint and sends it where it is wanted, but for what is there of an earlier try.

    Returns the bytes that were sent.

    Args:
        talk: With a receiver.
        store: Of the writer.
        name: Of the checkpoint there.
        keep: How many the receiver keeps.
        rest: Called with the seconds that each piece took; returns when the next may go.

    Raises:
        Refused: The receiver does not take it.
        OSError: The connection has ended, or the checkpoint is gone.
        Damaged: The checkpoint is not whole.
    """
    folder = store.root / name
    raw = files.read_small(folder / MANIFEST)
    manifest = parse_manifest(raw)
    with contextlib.ExitStack() as opened:
        # all at once: what is pruned meanwhile can be read on
        contents = [
            (file, entry.bytes, opened.enter_context((folder / file).open("rb")))
            for file, entry in sorted(manifest.files.items())
        ]
        talk.say(name=name, manifest=raw.decode(), token=store.token, keep=keep)
        answer, sent = talk.hear(), 0
        if not answer.get("send"):
            return 0
        for there, size, file in contents:
            if there in answer.get("shared", ()):
                continue
            begun_at = int(answer.get("have", {}).get(there, 0))
            left = size - file.seek(min(max(begun_at, 0), size))
            sent += left
            while left:
                begun = time.perf_counter()
                piece = file.read(min(left, PIECE))
                if not piece:
                    raise Damaged(f"{file.name} is shorter than it was")
                talk.connection.sendall(piece)
                if talk.exactly(1) != GOOD:
                    talk.hear()  # raises what is wrong
                left -= len(piece)
                rest(time.perf_counter() - begun)
    talk.hear()
    return sent
