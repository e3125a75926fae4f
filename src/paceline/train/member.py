"""A member of a job: a process with its device, what it says, and what all members do together.

A script that only evaluates or predicts needs no more than this of its session.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.spec import jobenv, rundir
from paceline.spec.errors import SettingError
from paceline.train import device as devices
from paceline.train import files, parallel, report, world
from paceline.train.comms import Comms
from paceline.train.data import disks
from paceline.train.data.loader import Progress
from paceline.train.journal import Journal
from paceline.train.metrics import Meter

T = TypeVar("T")


class Member:
    """A process of a job.

    Attributes:
        device: Where the model and the batches live.
        precision: Of parameters and of what is computed.
        folder: The run directory; only rank 0 writes to it.
        progress: How far the training is.
        comms: Collectives for small things.
        leaves_group: The process group was made by :func:`join` and ends with the session.
    """

    def __init__(
        self,
        place: world.World,
        device: torch.device,
        precision: devices.Precision,
        folder: Path,
        reporter: report.Reporter,
        *,
        mixed: bool = False,
    ) -> None:
        self.device, self.precision, self.folder = device, precision, folder
        self.progress = Progress()
        self.comms = Comms(place, torch.device("cpu") if mixed else device, mixed=mixed)
        self._journal = Journal(reporter, self.meter(), self.progress, self.comms, folder)
        self._file_writers: dict[str, Callable[[Path], None]] = {}
        self._writes_files = place.rank == 0
        self.leaves_group = True

    @property
    def world(self) -> world.World:
        """Place of this process; another one when ranks are lost or join."""
        return self.comms.world

    # -- what it computes with -----------------------------------------------------------

    def place(self, module: nn.Module, *, shard: bool = False) -> nn.Module:
        """The module on this session's device, its parameters in this session's precision.

        A tensor of higher precision keeps it: a module in float64 stays in float64.

        Args:
            module: Changed in place.
            shard: Spreads parameters, gradients and optimizer state over the ranks (FSDP2). Make
                the optimizer afterwards.
        """
        if shard and self.comms.mixed:
            raise SettingError(
                "--shard does not go with ranks on different kinds of devices",
                found="an accelerator and a CPU cannot put one parameter together",
                remedy="leave --shard out, or --device cpu on all of them",
            )
        placed = self.precision.widened(module.to(self.device))
        return parallel.shard(placed) if shard and not self.comms.is_alone else placed

    def autocast(self) -> AbstractContextManager[object]:
        """The context for the forward pass and the loss."""
        return self.precision.autocast(self.device)

    def meter(self) -> Meter:
        """Collects per-sample values and reduces them exactly over all ranks."""
        return Meter(
            self.comms.sum,
            self.comms.device,
            lambda count: 0 if self.progress.stand_in else count,
            self.comms.texts,
            lambda: self.progress.some_absent,
        )

    # -- what it says --------------------------------------------------------------------

    def say(self, text: str) -> None:
        """One line for the user, once."""
        self._journal.print(text)

    def event(self, name: str, **details: Any) -> None:
        """Records that something happened on this rank."""
        self._journal.event(name, **details)

    def phase(self, name: str) -> None:
        """Tells the launcher what this rank is doing now; not before it is with the others."""
        if not self.comms.joining:
            self._journal.heartbeat(name)

    def track(
        self,
        names: Sequence[str],
        *,
        project: str = "paceline",
        config: Mapping[str, Any] | None = None,
        each_node: bool = False,
    ) -> None:
        """Sends every record also to these trackers; to be called after :meth:`checkpoints`.

        A tracker that fails or hangs costs a warning and nothing else.

        Args:
            names: Of ``paceline.train.trackers.TRACKERS``.
            project: Name under which runs are collected.
            config: Settings, as the tracker shows them.
            each_node: One run for each node, in a group, instead of one for all.
        """
        if not os.environ.get(jobenv.PROBE):
            self._journal.track(names, project, config or {}, each_node)

    def save_config(self, config: Mapping[str, Any]) -> None:
        """Saves the effective settings in the run directory."""
        content = dict(config)
        self.keep(rundir.CONFIG, lambda folder: files.write_json(folder / rundir.CONFIG, content))

    def keep(self, name: str, write: Callable[[Path], None]) -> None:
        """Has rank 0 write something into the run directory; to be called on every rank.

        A rank that becomes rank 0 writes it again: it may have a disk of its own.

        Args:
            name: What is written takes the place of what was kept under this name.
            write: Is given the run directory.
        """
        self._file_writers[name] = write
        self._take_over_files()
        if self.world.rank == 0:
            write(self.folder)

    def _take_over_files(self) -> None:
        """Has the rank that is first now write what a former one may have taken with it."""
        is_first, was_writer = self.world.rank == 0, self._writes_files
        self._writes_files = is_first
        if not is_first or was_writer:
            return
        try:
            for write in self._file_writers.values():
                write(self.folder)
        except OSError as error:  # that ends no training
            warning = f"{self.folder} on {self.world.host} cannot be written to: {error.strerror}"
            self._journal.report("warning", warning=warning)

    def follow(self) -> None:
        """Has the rank that is first now speak for the job and keep its files; no collective."""
        self._journal.update_roles()
        self._take_over_files()

    # -- what all members do -------------------------------------------------------------

    def agree(self, what: str, value: str) -> None:
        """Raises on every rank when ``value`` is not the same on all of them."""
        self.comms.agree(what, value)

    def together(self, act: Callable[[], T]) -> T:
        """Acts on every rank; what one rank raises, every rank raises."""
        return self.comms.together(act)

    def once(self, folder: Path, make: Callable[[Path], None]) -> None:
        """Makes ``folder`` where it is missing: once for each disk, while the others wait.

        Args:
            folder: What is to exist afterwards, on every rank.
            make: Fills the empty folder that it is given.
        """
        disks.make_once(self.comms, folder, make)
