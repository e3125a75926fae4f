"""Which ranks share a disk, and something made once for each: a data set, a tokenizer, a cache.

Who sees which folder is found out by writing to it and looking, not by being told.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.spec.errors import DataError
from paceline.train.comms import Comms

PATIENCE = timedelta(hours=6)
_SECONDS_TO_SEE = 30.0  # a network disk may show a new name late


def once(comms: Comms, folder: Path, make: Callable[[Path], None]) -> None:
    """Makes ``folder`` where it is missing, once for each disk that holds it; others wait.

    Args:
        comms: All ranks must call this.
        folder: What is to exist afterwards, on every rank.
        make: Fills the empty folder that it is given; on success that becomes ``folder``.

    Raises:
        PacelineError: What ``make`` raised on any rank, on every rank.
        DataError: The folder does not appear on a rank.
    """
    if comms.alone or comms.joining:
        _make(folder, make)
        return
    group = _patient_group()
    waiting = replace(comms, group=group, device=torch.device("cpu"), mender=None)
    try:
        makers = _makers(waiting, folder.parent)
        waiting.together(lambda: _make(folder, make) if comms.world.rank in makers else None)
        waiting.together(lambda: _await(folder))
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


def _makers(comms: Comms, parent: Path) -> set[int]:
    """One rank for each storage: the lowest of those that see each other's marks."""
    token = comms.texts(secrets.token_hex(8))[0]
    leads = comms.world.local_rank == 0
    mine = _mark(parent, token, comms.world.rank)
    if leads:
        parent.mkdir(parents=True, exist_ok=True)
        mine.touch()
    leaders = [bool(row) for row in comms.rows(torch.tensor([int(leads)]))[:, 0]]
    marks = [there and _mark(parent, token, rank).exists() for rank, there in enumerate(leaders)]
    seen = comms.rows(torch.tensor([int(leads and there) for there in marks]))
    if leads:
        mine.unlink(missing_ok=True)
    return lowest(seen.tolist())


def lowest(seen: Sequence[Sequence[int]]) -> set[int]:
    """From who sees whose mark to one rank for each storage; rows of non-leaders are empty."""
    return {min(rank for rank, there in enumerate(row) if there) for row in seen if any(row)}


def _mark(parent: Path, token: str, rank: int) -> Path:
    return parent / f".paceline-{token}-{rank}"


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    if folder.exists():
        return
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
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
    try:
        if mine:
            with contextlib.suppress(OSError):  # nobody sees a mark in a read-only folder
                mark.touch()
        comms.barrier()
        seen = comms.rows(
            torch.tensor([int(os.access(mark, os.F_OK))])
        )  # also where it is forbidden
        return [bool(one) for one in seen[:, 0]]
    finally:
        if mine:
            mark.unlink(missing_ok=True)
