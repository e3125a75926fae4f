"""Which ranks share a disk, and something made once for each: a data set, a tokenizer, a cache.

Who sees which folder is found out by writing to it and looking, not by being told.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.spec.errors import DataError
from paceline.train.comms import Comms

MAKE_TIMEOUT = timedelta(hours=6)
_MARKER = re.compile(r"\.paceline-[0-9a-f]{16}")
_VISIBILITY_MARKER = re.compile(r"\.seen-[0-9a-f]{16}")
_VISIBILITY_TIMEOUT_S = 30.0  # a network disk may show a new name late


def make_once(comms: Comms, folder: Path, make: Callable[[Path], None]) -> None:
    """Makes ``folder`` if it is missing, once for each disk that holds it; a collective.

    Where a lost rank is made good, and it was to make the folder, another one of that disk does.

    Args:
        comms, folder: Of all ranks; what is to exist afterwards on each.
        make: Fills the empty folder that it is given; on success that becomes ``folder``.

    Raises:
        PacelineError: What ``make`` raised on any rank, on every rank.
        DataError: The folder does not appear on a rank.
    """
    if comms.is_alone or comms.joining:
        _make(folder, make, secrets.token_hex(8))
        return
    with _long_timeout(comms) as patient_comms:
        failed_makers: list[str] = []
        while not _try_make(patient_comms, folder, make, failed_makers):
            pass  # a rank was lost meanwhile


@contextlib.contextmanager
def _long_timeout(comms: Comms) -> Iterator[Comms]:
    """Yields communication in which ranks may wait for hours; their own if losses are repaired."""
    if comms.fault_handler is not None and comms.is_recoverable:
        with comms.fault_handler.patient(MAKE_TIMEOUT):
            yield comms
        return
    group = _long_timeout_group()
    try:
        yield replace(comms, group=group, device=torch.device("cpu"), fault_handler=None)
    finally:
        dist.destroy_process_group(group)


def _long_timeout_group() -> dist.ProcessGroup:
    """Makes a group in which ranks wait for hours for the one that makes a data set or a cache.

    The store's time-out also becomes that long while ranks meet to make the group.
    """
    store = dist.distributed_c10d._get_default_store()
    default_timeout = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(MAKE_TIMEOUT)
    try:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=MAKE_TIMEOUT)
        return group
    finally:
        store.set_timeout(default_timeout)


def _try_make(
    comms: Comms, folder: Path, make: Callable[[Path], None], failed_makers: list[str]
) -> bool:
    """Makes the folder on one rank of each disk; False if ranks were lost on the way.

    Only what all have heard decides, for a rank may learn of a loss, and so of its new place, one
    operation before another. Adds the names of those that began it to ``failed_makers``.
    """
    names, local_marker, makers = _elect_makers(comms, folder.parent)

    def clean_and_make() -> None:
        for name in failed_makers:  # all who live are here: nobody needs it any more
            (folder.parent / name).unlink(missing_ok=True)
            shutil.rmtree(_temporary_folder(folder, name), ignore_errors=True)
        _make(folder, make, local_marker)

    comms.together(lambda: clean_and_make() if local_marker in makers else None)
    failed_makers += filter(None, names)
    if len(comms.texts("")) < len(names):
        return False
    comms.together(lambda: _wait_for_folder(folder))
    return True


def _elect_makers(comms: Comms, parent: Path) -> tuple[list[str], str, set[str]]:
    """Returns names of all markers, this rank's, and those of the first rank on each disk."""
    is_leader = comms.world.local_rank == 0
    local_marker = f".paceline-{secrets.token_hex(8)}" if is_leader else ""
    if is_leader:
        parent.mkdir(parents=True, exist_ok=True)
        (parent / local_marker).touch()
    try:
        # a name of another rank is joined to a path, and removed if that rank is lost
        names = [name if _MARKER.fullmatch(name) else "" for name in comms.texts(local_marker)]
        seen = [name for name in names if is_leader and name and (parent / name).exists()]
        first = comms.texts(seen[0] if seen else "")
    finally:
        if is_leader:
            (parent / local_marker).unlink(missing_ok=True)
    return names, local_marker, {*filter(None, first)}


def _temporary_folder(folder: Path, name: str) -> Path:
    return folder.with_name(f".{folder.name}.{name.removeprefix('.paceline-')}.tmp")


def _make(folder: Path, make: Callable[[Path], None], name: str) -> None:
    if folder.exists():
        return
    temporary = _temporary_folder(folder, name)
    temporary.mkdir(parents=True)
    try:
        make(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # else another job was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _wait_for_folder(folder: Path) -> None:
    deadline = time.monotonic() + _VISIBILITY_TIMEOUT_S
    while not folder.exists():
        with contextlib.suppress(OSError):
            os.listdir(folder.parent)  # noqa: PTH208 - has a network disk look again
        if time.monotonic() > deadline:
            raise DataError(f"{folder} was made on another node but is not visible here")
        time.sleep(0.1)


def is_shared_by_all(comms: Comms, folder: Path, owner: int = 0) -> bool:
    """Whether every rank sees the owner's folder; a collective."""
    return all(visible_ranks(comms, folder, owner))


def visible_ranks(comms: Comms, folder: Path, owner: int = 0) -> list[bool]:
    """Returns, for each rank, whether it sees the owner's folder; a collective.

    The owner makes a marker there. The folders of other ranks do not matter.
    """
    is_owner = comms.world.rank == owner
    name = f".seen-{secrets.token_hex(8)}"
    marker = Path(comms.texts(str(folder.resolve() / name) if is_owner else "")[owner])
    is_valid = _VISIBILITY_MARKER.fullmatch(marker.name) is not None
    try:
        if is_owner:
            with contextlib.suppress(OSError):  # nobody sees a mark in a read-only folder
                marker.touch()
        comms.barrier()
        exists = is_valid and os.access(marker, os.F_OK)  # no error where it is forbidden
        return [bool(is_visible) for is_visible in comms.rows(torch.tensor([int(exists)]))[:, 0]]
    finally:
        if is_owner:
            marker.unlink(missing_ok=True)
