"""Files on their way to and from this node: in blocks, under their names only when they are whole.

What a launcher can ask about files stands at the end, as :data:`OPERATIONS`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Callable, Dict, Iterator, Tuple

from ..operations import in_queue, in_thread
from . import safe_paths, snapshot

if TYPE_CHECKING:
    from ..server import Agent

Message = Dict[str, Any]
RECEIVING, SENDING = "arriving", "departing"  # lines of work: see Agent.in_line


class Uploads:
    """Files that the launcher sends, several at a time; used from one thread."""

    def __init__(self) -> None:
        self._open: Dict[Tuple[str, str], safe_paths.IncomingFile] = {}

    def receive(self, root: str, path: str, request: Message, data: bytes, durable: bool) -> None:
        """The next block of ``path`` below ``root``; the file is there after the last one.

        Args:
            root, path: Where the file belongs.
            request: ``offset``, ``last``; with the last ``sha256`` and perhaps ``size``.
            data: The block.
            durable: Flush the file before it gets its name.
        """
        file = self._open.pop((root, path), None)
        if request["offset"] == 0:
            if file is not None:
                file.drop()  # somebody began and went away
            file = safe_paths.IncomingFile(root, path, durable)
        if file is None:
            raise ValueError("the beginning of %s did not come" % path)
        try:
            file.add(request["offset"], data)
            if request["last"]:
                file.finish(request.get("size", -1), request["sha256"])
            else:
                self._open[root, path] = file
        except BaseException:
            file.drop()
            raise

    def drop(self) -> None:
        """Forgets what has not come as a whole."""
        for file in self._open.values():
            file.drop()
        self._open = {}


class Downloads:
    """Files that the launcher fetches, several at a time; used from one thread."""

    def __init__(self) -> None:
        self._open: Dict[Tuple[str, str], Tuple[BinaryIO, "hashlib._Hash"]] = {}

    def block(self, request: Message) -> Tuple[Message, bytes]:
        """The next block of a file, and with the last one the hash of the whole.

        Args:
            request: ``root``, ``path`` (below it), ``offset``, ``count`` (bytes) and ``last``.

        Raises:
            ValueError: The file is not as long as the launcher believes.
        """
        key = (request["root"], request["path"])
        file, digest = self._open_at(key, request["offset"])
        data = file.read(request["count"])
        digest.update(data)
        if len(data) == request["count"] and not request["last"]:
            self._open[key] = file, digest
            return {}, data
        with file:
            if len(data) != request["count"] or file.read(1):
                raise ValueError("%s changed while it was read" % request["path"])
        return {"sha256": digest.hexdigest()}, data

    def _open_at(self, key: Tuple[str, str], offset: int) -> Tuple[BinaryIO, "hashlib._Hash"]:
        known = self._open.pop(key, None)
        if offset == 0:
            if known is not None:
                known[0].close()
            fd = safe_paths.open_file(*key, os.O_RDONLY)
            return os.fdopen(fd, "rb"), hashlib.sha256()
        if known is None or known[0].tell() != offset:
            raise ValueError("byte %d of %s is not the next one" % (offset, key[1]))
        return known

    def drop(self) -> None:
        """Closes what was not read to its end."""
        for file, _ in self._open.values():
            with contextlib.suppress(OSError):
                file.close()
        self._open = {}


# --- operations: what a launcher can ask about files ---------------------------------------------


@in_thread
def compare_tree(agent: Agent, request: Message, _: bytes) -> None:
    agent.reply(request, **snapshot.compare(request["root"], request["manifest"]))


@in_thread
def lacking_blobs(agent: Agent, request: Message, _: bytes) -> None:
    agent.reply(request, hashes=snapshot.missing_hashes(request["manifest"]))


@in_queue(RECEIVING)
def put_blob(agent: Agent, request: Message, blob: bytes) -> None:
    """Receives a block of the content ``sha256`` for the cache."""
    # not flushed: content of the cache is checked again before it is used
    path = snapshot.blob_path(request["sha256"])
    _receive_block(agent, request, blob, snapshot.cache_folder(), path, durable=False)


@in_queue(RECEIVING)
def put_blobs(agent: Agent, request: Message, blob: bytes) -> None:
    """Receives whole contents for the cache, concatenated; ``contents``: hash and size of each."""

    def contents() -> Iterator[Tuple[str, bytes]]:
        offset = 0
        for sha256, size in request["contents"]:
            yield sha256, blob[offset : offset + size]
            offset += size

    snapshot.store(contents())
    agent.reply(request)


@in_queue(RECEIVING)
def build_tree(agent: Agent, request: Message, _: bytes) -> None:
    """Builds ``manifest`` at ``name`` in the job's ``folder``; answers the tree's folder.

    A large tree comes in several requests, ``first`` to ``last``: it has its name with the last.
    ``damaged`` are hashes whose content has to be sent again, and with them the same request.
    """
    # what it is made of may still be arriving
    folder = snapshot.job_folder(request["folder"])
    if folder not in agent.folders:
        snapshot.claim_job_folder(folder)
        agent.folders.append(folder)
    (name,) = safe_paths.split_path(request["name"])
    damaged = snapshot.build_tree(
        str(folder / name), request["manifest"], request["first"], request["last"]
    )
    agent.reply(request, root=str(folder / name), damaged=damaged)


@in_queue(RECEIVING)
def put_file(agent: Agent, request: Message, blob: bytes) -> None:
    """Receives a block of the file ``path`` in the run folder under ``key``."""
    folder = snapshot.make_run_folder(request["key"])
    _receive_block(agent, request, blob, folder, request["path"], durable=True)


def _receive_block(agent: Agent, request: Message, blob: bytes, root: Path, path: str,
                   durable: bool) -> None:  # fmt: skip
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    agent.uploads.receive(str(root), path, request, blob, durable)
    agent.reply(request)


@in_queue(RECEIVING)
def replace_path(agent: Agent, request: Message, _: bytes) -> None:
    """Gives ``path`` in the run folder under ``key`` the name ``target``, in that one's place."""
    root = str(snapshot.run_folder(request["key"]))
    with contextlib.suppress(FileNotFoundError):
        safe_paths.remove(root, request["target"])
    safe_paths.rename(root, request["path"], request["target"])
    agent.reply(request)


@in_thread
def run_folder(agent: Agent, request: Message, _: bytes) -> None:
    """Where the run's files go on this node: the launcher's folder if it is seen here.

    ``path`` and ``token``: the launcher wrote the token into ``path``/``token_file``; a node that
    reads the same there sees the same folder, and shows by a file of its own (its identity is in
    the name) that its writing arrives, too: a container or an overlay may see the folder and keep
    what it writes. Else, or when ``own`` says so, a folder of the node's own under ``key``: it
    outlives the agent until the launcher says that it has everything (``discard_run_folder``).
    """
    if not request.get("own"):
        with contextlib.suppress(OSError):
            os.listdir(request["path"])  # else a network disk may show new names late
            token = (Path(request["path"]) / request["token_file"]).read_text()
            if token == request["token"]:
                sign = snapshot.SIGN_PREFIX + agent.identity.hex()
                os.close(safe_paths.open_file(request["path"], sign, os.O_WRONLY | os.O_CREAT))
                agent.reply(request, shared=True, folder=request["path"])
                return
    folder = snapshot.make_run_folder(request["key"], agent.identity.hex())
    agent.run_keys.setdefault(request["key"], [])
    agent.reply(request, shared=False, folder=str(folder))


def discard_run_folder(agent: Agent, request: Message, _: bytes) -> None:
    """Removes the run folder under ``key`` at the end: the launcher has all that is in it.

    ``only``: it has these, so the folder goes unless there is anything else in it.
    """
    only = request.get("only")
    if not snapshot.is_key(request["key"]) or not isinstance(only, (list, type(None))):
        raise ValueError("not the key of a run")
    agent.run_keys[request["key"]] = only
    agent.reply(request)


def keep_folder(agent: Agent, request: Message, _: bytes) -> None:
    """Leaves the job's folder that holds ``root`` at the end: some of it was not taken away."""
    root = Path(request["root"])
    agent.folders[:] = [folder for folder in agent.folders if folder not in (root, *root.parents)]
    agent.reply(request)


@in_thread
def list_results(agent: Agent, request: Message, _: bytes) -> None:
    """Answers files under ``root`` that are new or changed against ``manifest``."""
    files = snapshot.changed_files(request["root"], request.get("manifest"))
    agent.reply(request, files=files)


@in_queue(SENDING)
def read_block(agent: Agent, request: Message, _: bytes) -> None:
    """The next ``count`` bytes of ``path`` below ``root``; with the ``last`` the file's hash."""
    about, data = agent.downloads.block(request)
    agent.reply(request, data, **about)


OPERATIONS: "Dict[str, Callable[[Agent, Message, bytes], None]]" = {
    "compare_tree": compare_tree,
    "lacking_blobs": lacking_blobs,
    "put_blob": put_blob,
    "put_blobs": put_blobs,
    "build_tree": build_tree,
    "put_file": put_file,
    "place": replace_path,
    "run_folder": run_folder,
    "discard_run_folder": discard_run_folder,
    "keep_folder": keep_folder,
    "list_results": list_results,
    "read_block": read_block,
}
