"""A member of a job: a process with its device, its output, and operations of all members.

A script that only evaluates or predicts uses no other part of its session.
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
    """One process of a job.

    Attributes:
        device: Device of the model and the batches.
        precision: Precision of parameters and computation.
        folder: The run directory; only rank 0 writes to it.
        progress: Position of the training.
        comms: Collectives for small tensors and texts.
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
        # until the training begins: a start that is refused leaves the run as it is
        self._is_writing_deferred = bool(rundir.checkpoints(folder))
        self._writes_files = place.rank == 0 and not self._is_writing_deferred
        self.leaves_group = True

    @property
    def world(self) -> world.World:
        """Place of this process in the job; changes when ranks are lost or join."""
        return self.comms.world

    # -- device and precision ------------------------------------------------------------

    def place(self, module: nn.Module, *, shard: bool = False) -> nn.Module:
        """Moves a module to this session's device, and its parameters to this session's precision.

        A tensor of higher precision keeps it: a module in float64 stays in float64.

        Args:
            module: Changed in place.
            shard: Spreads parameters, gradients and optimizer state over the ranks (FSDP2). Make
                the optimizer afterwards.
        """
        if shard and self.comms.mixed:
            raise SettingError(
                "--shard cannot be combined with ranks on different kinds of devices",
                found="ranks on an accelerator and on a CPU cannot share one sharded parameter",
                remedy="leave --shard out, or --device cpu on all of them",
            )
        placed = self.precision.widened(module.to(self.device))
        return parallel.shard(placed) if shard and not self.comms.is_alone else placed

    def autocast(self) -> AbstractContextManager[object]:
        """Returns the context for the forward pass and the loss."""
        return self.precision.autocast(self.device)

    def meter(self) -> Meter:
        """Makes a meter: it collects per-sample values and reduces them exactly over all ranks."""
        return Meter(
            self.comms.sum,
            self.comms.device,
            lambda count: 0 if self.progress.stand_in else count,
            self.comms.texts,
            lambda: self.progress.some_absent,
        )

    # -- output --------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Prints one line for the user, once for the job."""
        self._journal.print(text)

    def event(self, name: str, **details: Any) -> None:
        """Records that something happened on this rank."""
        self._journal.event(name, **details)

    def phase(self, name: str) -> None:
        """Tells the launcher what this rank is doing; does nothing in a process that is joining."""
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
        """Sends every record also to these trackers; call it after ``checkpoints``.

        A tracker that fails or hangs costs a warning and nothing else.

        Args:
            names: Names in ``paceline.train.trackers.TRACKERS``.
            project: Name under which runs are collected.
            config: Settings that the tracker shows.
            each_node: Makes one run for each node, in a group, instead of one for all.
        """
        if not os.environ.get(jobenv.PROBE):
            self._journal.track(names, project, config or {}, each_node)

    def save_config(self, config: Mapping[str, Any]) -> None:
        """Saves the effective settings in the run directory."""
        content = dict(config)
        self.keep(rundir.CONFIG, lambda folder: files.write_json(folder / rundir.CONFIG, content))

    def keep(self, name: str, write: Callable[[Path], None]) -> None:
        """Lets rank 0 write a file into the run directory; call it on every rank.

        A rank that becomes rank 0 writes it again: it may have a disk of its own. In the directory
        of a run with checkpoints, it is written when the training begins.

        Args:
            name: Key of the file; replaces the earlier ``write`` of the same name.
            write: Called with the run directory.
        """
        self._file_writers[name] = write
        if self._is_writing_deferred:
            return
        self._take_over_files()
        if self.world.rank == 0:
            write(self.folder)

    def _take_over_files(self) -> None:
        """Writes the kept files again on a rank that has become rank 0."""
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
        """Makes this rank report and write files for the job if it has become rank 0."""
        self._journal.update_roles()
        self.write_deferred_files()

    def write_deferred_files(self) -> None:
        """Writes the deferred files, now that the training is known to be that of this folder."""
        self._is_writing_deferred = False
        self._take_over_files()

    # -- operations of all ranks ---------------------------------------------------------

    def agree(self, what: str, value: str, remedy: str = "") -> None:
        """Raises :class:`JobError` on every rank when ``value`` is not the same on all of them.

        ``remedy``: What the error says to do; by default to give all nodes the same files.
        """
        self.comms.agree(what, value, remedy)

    def together(self, act: Callable[[], T]) -> T:
        """Calls ``act`` on every rank; an error of one rank is raised on every rank."""
        return self.comms.together(act)

    def once(self, folder: Path, make: Callable[[Path], None]) -> None:
        """Makes ``folder`` if it is missing: once for each disk, while the other ranks wait.

        Args:
            folder: Folder that exists afterwards on every rank.
            make: Fills the empty folder that it is given.
        """
        disks.make_once(self.comms, folder, make)
