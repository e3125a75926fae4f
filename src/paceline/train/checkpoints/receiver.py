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
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.spec.rundir import (
    BEST,
    MANIFEST,
    Version,
    checkpoint_name,
    is_frozen_file,
    parse_version,
)
from paceline.spec.schema import SIZE, boolean, dict_of, list_of, matches, record, text
from paceline.spec.training.checkpoint_manifest import (
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    parse_manifest,
)
from paceline.train import files
from paceline.train.checkpoints.store import Fenced, Store
from paceline.train.reduce import handshakes
from paceline.train.reduce.handshakes import Caller, greetings, guard, job_hosts, read_exactly

PIECE_BYTES = 1 << 18  # bytes after which the writer waits for a sign
ACCEPTED, REJECTED = b"+", b"-"  # the sign
RESERVED_BYTES = 16 << 20  # bytes of a disk that copies leave free

_PART, _OFFER = ".copy.tmp", ".offer"  # a folder that is half there; in it, the manifest of it all
_PURPOSE, _MAC_BYTES = b"paceline checkpoints", 32
_MAX_MESSAGE_BYTES = 1 << 24  # bytes of a message: a manifest of thousands of files
_MAX_PROBLEM_LENGTH = 300  # characters
_GREETING_TIMEOUT_S = 5.0
_IO_TIMEOUT_S = 60.0
_REPLY = record(
    {"send": boolean, "have": dict_of(SIZE), "shared": list_of(text())}
)  # to an offer, and at the end of a copy
_CLOSE_TIMEOUT_S = 1.0  # for a writer to notice that nothing more is taken


class CopyRefused(Exception):
    """The peer does not accept the copy, at all or from this sender; the message says why."""


class CopyChannel:
    """Connection whose messages are authenticated with the job's key, in order.

    What is between messages (the content of files) is proven by the hashes in the manifest.

    Args:
        connection: Both sides have proven the job's key; closed by its owner.
        connection_key: The key of this connection.
        calls: This is the caller's side.
        timeout_s: How long each message or acknowledgement may take.

    Raises:
        OSError: By all methods: the connection ends, or nothing comes.
        CopyRefused: By ``receive``: the other side does not know the key, or sends no message.
    """

    def __init__(
        self,
        connection: socket.socket,
        connection_key: bytes,
        *,
        calls: bool,
        timeout_s: float = _IO_TIMEOUT_S,
    ) -> None:
        self.connection, self._timeout_s = connection, timeout_s
        connection.settimeout(timeout_s)
        self._key = connection_key
        self._local_side, self._peer_side = (b"c", b"s") if calls else (b"s", b"c")
        self._num_sent = self._num_received = 0

    @classmethod
    def connect(
        cls, connection: socket.socket, key: bytes, timeout_s: float = _IO_TIMEOUT_S
    ) -> CopyChannel:
        """Opens the caller's side. OSError if the other side does not know the key."""
        deadline = time.monotonic() + _GREETING_TIMEOUT_S
        connection_key = handshakes.prove(connection, key, _PURPOSE, deadline)
        handshakes.check_reply(connection, connection_key, deadline)
        return cls(connection, connection_key, calls=True, timeout_s=timeout_s)

    @classmethod
    def accept(cls, caller: Caller, key: bytes) -> CopyChannel | None:
        """Opens the called side; ``None`` if the caller does not know the key, or has gone."""
        with contextlib.suppress(OSError):
            if (verified := handshakes.verify(caller, key, _PURPOSE)) is not None:
                handshakes.reply(caller.connection, verified[0])
                return cls(caller.connection, verified[0], calls=False)
        return None

    def send(self, **message: Any) -> None:
        body = json.dumps(message).encode()
        mac = self._mac(self._local_side, self._num_sent, body)
        self._num_sent += 1
        self.connection.sendall(len(body).to_bytes(4, "big") + mac + body)

    def receive(self) -> dict[str, Any]:
        length = int.from_bytes(self.read_exactly(4), "big")
        if length > _MAX_MESSAGE_BYTES:
            raise CopyRefused("this is no message of ours")
        mac = self.read_exactly(_MAC_BYTES)
        body = self.read_exactly(length)
        if not hmac.compare_digest(mac, self._mac(self._peer_side, self._num_received, body)):
            raise CopyRefused("it does not know this job's key")
        self._num_received += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise CopyRefused("this is no message of ours")
        if problem := message.get("problem"):
            raise CopyRefused(str(problem)[:_MAX_PROBLEM_LENGTH])
        return message

    def read_exactly(self, count: int) -> bytes:
        """Reads this many bytes."""
        return read_exactly(self.connection, count, time.monotonic() + self._timeout_s)

    def _mac(self, side: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, side + number.to_bytes(8, "big") + body, "sha256")


class Receiver:
    """Receives copies into this host's folder of checkpoints.

    Args:
        address: Of this host, as the others reach it.
        keep: How many stay here, besides the newest and the best of earlier runs. The sender, which
            any host of the job could be, does not choose that.

    Attributes:
        address: Address and port.
        token: The present writer's; 0: this rank has heard of none yet.
        sender: The address of rank 0, from which alone copies are taken: every rank knows the key.
            Empty when it is not known.
    """

    def __init__(self, root: Path, key: bytes, address: str, keep: int) -> None:
        self._root, self._key, self._keep = root, key, keep
        self._protected = Store(root).newest_and_best()
        self.token, self.sender = 0, ""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server(
            (address, 0), family=family, backlog=handshakes.MAX_CALLERS
        )
        self._guard = guard(self._listener)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._is_open, self._storing = True, threading.Lock()
        self._active_connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="paceline-copies", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; it ends when a rank's sockets are cut in a recovery."""
        return self._thread.is_alive()

    def admit_hosts(self) -> None:
        """Accepts connections from the current hosts of the job."""
        hosts = job_hosts()
        if self._guard is not None and hosts is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._guard.admit(self._listener, hosts)

    def drop_sender(self) -> None:
        """Disconnects the current sender, which may be lost."""
        if self._active_connection is not None:
            with contextlib.suppress(OSError):
                self._active_connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stops receiving and removes partial copies."""
        self._is_open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _clear(self, except_folder: Path | None = None) -> None:
        """Removes partial copies."""
        for folder in self._root.glob(f".*{_PART}"):
            if folder != except_folder:
                shutil.rmtree(folder, ignore_errors=True)

    def _serve(self) -> None:
        callers = greetings(self._listener, 0, _GREETING_TIMEOUT_S)
        with self._listener, contextlib.suppress(OSError), contextlib.closing(callers):
            for caller in callers:
                is_sender = self._is_sender(caller.connection)
                talk = CopyChannel.accept(caller, self._key) if is_sender else None
                if talk is None:
                    caller.connection.close()
                    continue
                self.drop_sender()  # who proves itself now is the only one that still writes
                self._active_connection = caller.connection
                threading.Thread(
                    target=self._receive, args=(talk,), name="paceline-copy", daemon=True
                ).start()
        if not self._is_open:
            with self._storing:
                self._clear()

    def _is_sender(self, connection: socket.socket) -> bool:
        with contextlib.suppress(OSError):  # the connection has ended
            return self.sender in ("", connection.getpeername()[0])
        return False

    def _receive(self, talk: CopyChannel) -> None:
        refusals = CopyRefused, DamagedCheckpoint, Fenced, OSError, ValueError, KeyError, TypeError
        # whatever is wrong with one, the next is served
        with talk.connection, self._storing, contextlib.suppress(OSError, ValueError, CopyRefused):
            offer = talk.receive()
            try:
                answer: dict[str, Any] = self._store(talk, offer)
            except refusals as problem:
                answer = {"problem": _problem_text(problem)}
            talk.send(**answer)

    def _store(self, talk: CopyChannel, offer: Mapping[str, Any]) -> dict[str, bool]:
        """Receives an offered checkpoint, installs it and prunes older ones."""
        raw = str(offer["manifest"]).encode()
        name, manifest = str(offer["name"]), parse_manifest(raw)
        version, store = parse_version(name), Store(self._root, int(offer["token"]))
        if version is None or version[1] != manifest.step or version[0] > store.token:
            raise CopyRefused(f"{name[:100]!r} is no name of this checkpoint")
        if self.token not in (0, store.token):
            raise CopyRefused("another writer has taken over")
        store.check_not_fenced()
        with contextlib.suppress(OSError):
            if files.read_bytes_limited(self._root / name / MANIFEST) == raw:
                return {"here": True}
        if version in self._protected:
            return self._keep_protected(store, version, manifest)
        self._root.mkdir(parents=True, exist_ok=True)
        folder = self._root / f".{name}{_PART}"
        self._clear(except_folder=folder)
        received = _resume_or_create(folder, raw, manifest)
        linked = _linked_files(store, folder, manifest)
        incoming = {name: entry for name, entry in manifest.files.items() if name not in linked}
        received = {name: size for name, size in received.items() if name in incoming}
        needed = sum(entry.bytes for entry in incoming.values()) - sum(received.values())
        free = shutil.disk_usage(self._root).free
        if free < needed + RESERVED_BYTES:
            shutil.rmtree(folder, ignore_errors=True)
            raise CopyRefused(
                f"the disk of {self._root} is too full: {needed / 1e6:.1f} MB needed besides the"
                f" {RESERVED_BYTES / 1e6:.0f} MB that copies leave, {free / 1e6:.1f} MB free"
            )
        can_continue = False
        try:
            talk.send(send=True, have=received, shared=[*linked])
            _receive_files(talk, folder, incoming, received, lambda: self._is_open)
            for name, path in linked.items():
                path.rename(folder / name)
            (folder / _OFFER).rename(folder / MANIFEST)
            store.check_not_fenced()
            store.install(folder, version, is_best=manifest.info.get("best") is True)
        except (ConnectionError, TimeoutError):
            can_continue = self._is_open  # there is a new group, or the writer is lost
            raise
        finally:
            if not can_continue:
                shutil.rmtree(folder, ignore_errors=True)
        store.prune(self._keep, self._protected)
        return {"taken": True}

    def _keep_protected(self, store: Store, version: Version, offered: Manifest) -> dict[str, bool]:
        """Keeps a checkpoint that was here before: the sender may have been taken over since.

        The same weights may be offered again, because an evaluation has shown that they are the
        best.
        """
        name = checkpoint_name(version)
        kept = parse_manifest(files.read_bytes_limited(self._root / name / MANIFEST))
        if kept.weights != offered.weights:
            raise CopyRefused(f"{name} is another checkpoint here, and is kept")
        if offered.info.get("best") is True:
            store.point(BEST, version)
        return {"here": True}


def _resume_or_create(folder: Path, raw: bytes, manifest: Manifest) -> dict[str, int]:
    """Creates a folder for a copy, or returns bytes received by an earlier try, by file.

    Of a file that is there the last byte is missing at least: its sender has something to send.
    """
    with contextlib.suppress(OSError):
        if files.read_bytes_limited(folder / _OFFER) == raw:
            received = {}
            for name, entry in manifest.files.items():
                path = folder / name
                if path.is_file() and (size := min(path.stat().st_size, entry.bytes - 1)) > 0:
                    os.truncate(path, size)
                    received[name] = size
            return received
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / _OFFER).write_bytes(raw)
    return {}


def _linked_files(store: Store, folder: Path, manifest: Manifest) -> dict[str, Path]:
    """Links frozen weights that an earlier checkpoint here has; returns links by file.

    Under another name until all has come, for what is half there is cut and written to.
    """
    linked = {}
    for name, entry in manifest.files.items():
        path = folder / f".{name}"
        if is_frozen_file(name) and (path.exists() or store.link(name, entry, path)):
            linked[name] = path
    return linked


def _problem_text(problem: BaseException) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror
    return str(getattr(problem, "message", problem))[:_MAX_PROBLEM_LENGTH] or type(problem).__name__


def _receive_files(
    talk: CopyChannel,
    folder: Path,
    incoming: Mapping[str, FileEntry],
    received: Mapping[str, int],
    is_wanted: Callable[[], bool],
) -> None:
    """Receives the files' contents and acknowledges each piece."""
    try:
        for name, entry in sorted(incoming.items()):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            digest, remaining = hashlib.sha256(), entry.bytes - received.get(name, 0)
            if name in received:
                with path.open("rb") as file:
                    while piece := file.read(PIECE_BYTES):
                        digest.update(piece)
            with path.open("ab" if name in received else "wb", buffering=0) as file:
                while remaining:
                    piece = talk.read_exactly(min(remaining, PIECE_BYTES))
                    if not is_wanted():
                        raise CopyRefused("this rank is leaving")
                    unwritten = memoryview(piece)
                    while unwritten:
                        unwritten = unwritten[file.write(unwritten) :]
                    digest.update(piece)
                    remaining -= len(piece)
                    if remaining:
                        talk.connection.sendall(ACCEPTED)
                os.fsync(file.fileno())
            if digest.hexdigest() != entry.sha256:
                raise CopyRefused(f"{name} did not arrive as it was written (its hash differs)")
            if entry.bytes:
                talk.connection.sendall(ACCEPTED)
        for parent in {(folder / name).parent for name in incoming}:
            files.sync_folder(parent)
    except (OSError, CopyRefused):
        with contextlib.suppress(OSError):
            talk.connection.sendall(REJECTED)
        raise


def send_checkpoint(
    talk: CopyChannel, store: Store, name: str, pause: Callable[[float], None]
) -> int:
    """Offers a checkpoint and sends what the receiver lacks; returns the bytes that were sent.

    Args:
        store, name: The writer's store, and the checkpoint's name there.
        pause: Called with the seconds that each piece took; returns when the next may go.

    Raises:
        CopyRefused: The receiver does not take it.
        OSError: The connection has ended, or the checkpoint is gone.
        DamagedCheckpoint: The checkpoint is not whole.
    """
    folder = store.root / name
    raw = files.read_bytes_limited(folder / MANIFEST)
    manifest = parse_manifest(raw)
    with contextlib.ExitStack() as opened:
        # all at once: what is pruned meanwhile can be read on
        contents = [
            (file, entry.bytes, opened.enter_context((folder / file).open("rb")))
            for file, entry in sorted(manifest.files.items())
        ]
        talk.send(name=name, manifest=raw.decode(), token=store.token)
        answer, sent = talk.receive(), 0
        if not matches(_REPLY, answer):
            raise CopyRefused("it answers an offer with what no receiver of this version sends")
        if not answer.get("send"):
            return 0
        for name_in_checkpoint, size, file in contents:
            if name_in_checkpoint in answer.get("shared", ()):
                continue
            offset = answer.get("have", {}).get(name_in_checkpoint, 0)
            remaining = size - file.seek(min(offset, size))
            sent += remaining
            while remaining:
                start = time.perf_counter()
                piece = file.read(min(remaining, PIECE_BYTES))
                if not piece:
                    raise DamagedCheckpoint(f"{file.name} is shorter than it was")
                talk.connection.sendall(piece)
                if talk.read_exactly(1) != ACCEPTED:
                    talk.receive()  # raises what is wrong
                remaining -= len(piece)
                pause(time.perf_counter() - start)
    talk.receive()
    return sent
