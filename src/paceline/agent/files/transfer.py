"""Requests by which the launcher sends code and files, and fetches results."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, Tuple

from ..operations import in_queue, in_thread
from . import outputs, safe_paths, snapshot
from .blocks import RECEIVING, SENDING

if TYPE_CHECKING:
    from ..operations import Agent

Message = Dict[str, Any]


@in_thread
def compare_tree(agent: Agent, request: Message, _: bytes) -> None:
    """Answers how the tree at ``root`` differs from ``manifest``."""
    agent.reply(request, **snapshot.compare(request["root"], request["manifest"]))


@in_thread
def lacking_blobs(agent: Agent, request: Message, _: bytes) -> None:
    """Answers which hashes of ``manifest`` have no content in the cache."""
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

    A large manifest comes in several requests, from ``first`` to ``last``; the tree gets its name
    with the last. If the answer has ``damaged`` hashes, their content and then the same request
    must be sent again. The tree also gets the folder ``workdir``, in which ranks will run.
    """
    # it is in this queue because contents of the tree may still be arriving
    folder = snapshot.job_folder(request["folder"])
    if folder not in agent.folders:
        snapshot.claim_job_folder(folder)
        agent.folders.append(folder)
    (name,) = safe_paths.split_path(request["name"])
    root = str(folder / name)
    damaged = snapshot.build_tree(root, request["manifest"], request["first"], request["last"],
                                  request.get("workdir", ""))  # fmt: skip
    agent.reply(request, root=root, damaged=damaged)


@in_queue(RECEIVING)
def put_file(agent: Agent, request: Message, blob: bytes) -> None:
    """Receives a block of the file ``path`` in the run folder under ``key``."""
    folder = snapshot.make_run_folder(request["key"])
    _receive_block(agent, request, blob, folder, request["path"], durable=True)


def _receive_block(agent: Agent, request: Message, blob: bytes, root: Path, path: str,
                   durable: bool) -> None:  # fmt: skip
    safe_paths.make_folder(str(root))
    agent.uploads.receive(str(root), path, request, blob, durable)
    agent.reply(request)


@in_queue(RECEIVING)
def replace_path(agent: Agent, request: Message, _: bytes) -> None:
    """Renames ``path`` in the run folder under ``key`` to ``target``, which it replaces."""
    root = str(snapshot.run_folder(request["key"]))
    with contextlib.suppress(FileNotFoundError):
        safe_paths.remove(root, request["target"])
    safe_paths.rename(root, request["path"], request["target"])
    agent.reply(request)


@in_thread
def run_folder(agent: Agent, request: Message, _: bytes) -> None:
    """Answers the folder of the run's files on this node: the launcher's, if it is shared.

    The launcher has written ``token`` into ``path``/``token_file``. A node that reads it there sees
    the same folder. It then writes a file with its identity in the name, because a container or an
    overlay may show the folder without passing on what is written there. Otherwise, or with
    ``own``, the node uses a folder of its own under ``key``. That folder outlives the agent until
    the launcher has fetched everything (``discard_run_folder``).
    """
    if not request.get("own"):
        with contextlib.suppress(OSError):
            os.listdir(request["path"])  # makes a network disk show new names at once
            token = (Path(request["path"]) / request["token_file"]).read_text()
            if token == request["token"]:
                snapshot.sign_folder(request["path"], agent.identity.hex())
                agent.reply(request, shared=True, folder=request["path"])
                return
    # in the queue in which folders are removed: none must appear after the agent's end
    agent.in_queue(RECEIVING, lambda: _make_run_folder(agent, request), request)


def _make_run_folder(agent: Agent, request: Message) -> None:
    folder = snapshot.make_run_folder(request["key"], agent.identity.hex())
    outputs.keep_abandoned(folder)
    agent.run_keys.setdefault(request["key"], [])
    agent.reply(request, shared=False, folder=str(folder))


def discard_run_folder(agent: Agent, request: Message, _: bytes) -> None:
    """Has the run folder under ``key`` removed at the agent's end: its files were fetched.

    ``only``: the fetched files; the folder stays if it holds others. Null for all.
    """
    only = request.get("only")
    if not snapshot.is_key(request["key"]) or not isinstance(only, (list, type(None))):
        raise ValueError("not the key of a run")
    agent.run_keys[request["key"]] = only
    agent.reply(request)


def keep_folder(agent: Agent, request: Message, _: bytes) -> None:
    """Keeps the job's folder that holds ``root``, because some of its files were not fetched."""
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
    """Answers the next ``count`` bytes of ``path`` below ``root``, and at the end its hash."""
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
