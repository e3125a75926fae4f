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

PATIENCE = timedelta(hours=6)
_MARK = re.compile(r"\.paceline-[0-9a-f]{16}")
_SEEN = re.compile(r"\.seen-[0-9a-f]{16}")
_SECONDS_TO_SEE = 30.0  # a network disk may show a new name late


def once(comms: Comms, folder: Path, make: Callable[[Path], None]) -> None:
    """Makes ``folder`` where it is missing, once for each disk that holds it; others wait.

    Where a lost rank is made good, and it was to make the folder, another one of that disk does.

    Args:
        comms: All ranks must call this.
        folder: What is to exist afterwards, on every rank.
        make: Fills the empty folder that it is given; on success that becomes ``folder``.

    Raises:
        PacelineError: What ``make`` raised on any rank, on every rank.
        DataError: The folder does not appear on a rank.
    """
    if comms.alone or comms.joining:
        _make(folder, make, secrets.token_hex(8))
        return
    with _patient(comms) as waiting:
        former: list[str] = []
        while not _made_by_some(waiting, folder, make, former):
            pass  # a rank was lost meanwhile


@contextlib.contextmanager
def _patient(comms: Comms) -> Iterator[Comms]:
    """For ranks that may wait for hours: in a group for that alone, which a lost rank ends.

    Where it is made good, in the group that they have.
    """
    if comms.mender is not None and comms.mender.able:
        with comms.mender.patient(PATIENCE):
            yield comms
        return
    group = _patient_group()
    try:
        yield replace(comms, group=group, device=torch.device("cpu"), mender=None)
    finally:
        dist.destroy_process_group(group)


def _patient_group() -> dist.ProcessGroup:
    """Of all ranks; also who comes to it late is waited for, which gloo leaves to the store."""
    store = dist.distributed_c10d._get_default_store()
    usual = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(PATIENCE)
    try:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=PATIENCE)
        return group
    finally:
        store.set_timeout(usual)


def _made_by_some(
    comms: Comms, folder: Path, make: Callable[[Path], None], former: list[str]
) -> bool:
    """One rank of each disk makes it; False where ranks were lost on the way.

    Only what all have heard decides, for a rank may learn of a loss, and so of its new place, one
    operation before another.

    Args:
        comms: As for :func:`once`, and the next two as well.
        folder: What is to exist afterwards.
        make: Fills it.
        former: Names of those that began it in vain; filled here.
    """
    names, mine, makers = _makers(comms, folder.parent)

    def act() -> None:
        for name in former:  # all who live are here: nobody needs it any more
            (folder.parent / name).unlink(missing_ok=True)
            shutil.rmtree(_unfinished(folder, name), ignore_errors=True)
        _make(folder, make, mine)

    comms.together(lambda: act() if mine in makers else None)
    former += filter(None, names)
    if len(comms.texts("")) < len(names):
        return False
    comms.together(lambda: _await(folder))
    return True


def _makers(comms: Comms, parent: Path) -> tuple[list[str], str, set[str]]:
    """Names of all marks, this rank's, and those of one rank for each storage.

    The first of those that see each other's marks.
    """
    leads = comms.world.local_rank == 0
    mine = f".paceline-{secrets.token_hex(8)}" if leads else ""
    if leads:
        parent.mkdir(parents=True, exist_ok=True)
        (parent / mine).touch()
    try:
        # a name of another rank is joined to a path, and removed if that rank is lost
        names = [name if _MARK.fullmatch(name) else "" for name in comms.texts(mine)]
        seen = [name for name in names if leads and name and (parent / name).exists()]
        first = comms.texts(seen[0] if seen else "")
    finally:
        if leads:
            (parent / mine).unlink(missing_ok=True)
    return names, mine, {*filter(None, first)}


def _unfinished(folder: Path, name: str) -> Path:
    return folder.with_name(f".{folder.name}.{name.removeprefix('.paceline-')}.tmp")


def _make(folder: Path, make: Callable[[Path], None], name: str) -> None:
    if folder.exists():
        return
    temporary = _unfinished(folder, name)
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


def _await(folder: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_SEE
    while not folder.exists():
        with contextlib.suppress(OSError):
            os.listdir(folder.parent)  # noqa: PTH208 - has a network disk look again
        if time.monotonic() > deadline:
            raise DataError(f"{folder} was made on another node but is not visible here")
        time.sleep(0.1)


def folder_of_all(comms: Comms, folder: Path, owner: int = 0) -> bool:
    """Whether every rank sees the owner's folder; the arguments are those of :func:`who_sees`."""
    return all(who_sees(comms, folder, owner))


def who_sees(comms: Comms, folder: Path, owner: int = 0) -> list[bool]:
    """Of each rank, whether it sees the owner's folder, by a mark that the owner makes in it.

    Args:
        comms: All ranks must call this.
        folder: Of the owner; what other ranks give does not matter.
        owner: A rank.
    """
    mine = comms.world.rank == owner
    name = f".seen-{secrets.token_hex(8)}"
    mark = Path(comms.texts(str(folder.resolve() / name) if mine else "")[owner])
    known = _SEEN.fullmatch(mark.name) is not None
    try:
        if mine:
            with contextlib.suppress(OSError):  # nobody sees a mark in a read-only folder
                mark.touch()
        comms.barrier()
        seen = comms.rows(
            torch.tensor([int(known and os.access(mark, os.F_OK))])
        )  # also where it is forbidden
        return [bool(one) for one in seen[:, 0]]
    finally:
        if mine:
            mark.unlink(missing_ok=True)
