"""Requests about folders of data, and about copies of the launcher's folders."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Callable, Dict

from ..operations import in_queue, in_thread
from . import data, snapshot
from .blocks import RECEIVING

if TYPE_CHECKING:
    from ..operations import Agent

Message = Dict[str, Any]
LISTING = "listing"  # a queue: see Agent.in_queue


@in_thread
def data_folder(agent: Agent, request: Message, _: bytes) -> None:
    """Answers data.fingerprints of ``path`` here, and the folder ``name`` of the copy ``key``."""
    folder = agent.data_copies.open_copy(request["key"], request["name"])
    place = data.copy_folder(request["key"])
    agent.reply(
        request,
        marks=data.fingerprints(request["path"]),
        folder=str(folder),
        sign=str(place / (data.SIGN_PREFIX + agent.identity.hex())),
        free=min(shutil.disk_usage(str(place)).free, snapshot.MAX_BYTES),
    )


@in_queue(LISTING)
def list_data(agent: Agent, request: Message, _: bytes) -> None:
    """Answers the next items below ``root``; with ``first``, from the beginning."""
    files, is_complete = agent.data_copies.next_page(request["root"], request["first"])
    agent.reply(request, files=files, last=is_complete)


@in_thread
def hash_data(agent: Agent, request: Message, _: bytes) -> None:
    """Answers the SHA-256 of ``paths`` below ``root``."""
    agent.reply(request, hashes=data.hashes(request["root"], request["paths"]))


@in_queue(RECEIVING)
def settle_data(agent: Agent, request: Message, _: bytes) -> None:
    """Removes the files ``gone`` of a copy; files in ``same`` get their originals' times."""
    agent.data_copies.update(request["key"], request["name"], request["gone"], request["same"])
    agent.reply(request)


@in_queue(RECEIVING)
def put_data_files(agent: Agent, request: Message, blob: bytes) -> None:
    """Receives small files of a copy: their ``items``, and their contents concatenated."""
    agent.data_copies.write_many(request["key"], request["name"], request["items"], blob)
    agent.reply(request)


@in_queue(RECEIVING)
def have_data(agent: Agent, request: Message, _: bytes) -> None:
    """Answers how much of a copy's file ``path`` has arrived earlier."""
    size, sha256 = agent.data_copies.resume(request["key"], request["name"], request["path"])
    agent.reply(request, size=size, sha256=sha256)


@in_queue(RECEIVING)
def put_data(agent: Agent, request: Message, blob: bytes) -> None:
    """Receives the next block of a copy's file ``path``."""
    agent.data_copies.write_block(request["key"], request["name"], request["path"], request, blob)
    agent.reply(request)


OPERATIONS: "Dict[str, Callable[[Agent, Message, bytes], None]]" = {
    "data_folder": data_folder,
    "list_data": list_data,
    "hash_data": hash_data,
    "settle_data": settle_data,
    "put_data_files": put_data_files,
    "have_data": have_data,
    "put_data": put_data,
}
