"""A run's checkpoints: made when they are due, found again at the start."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.spec import jobenv
from paceline.spec.errors import JobError, SettingError
from paceline.train import wrapping
from paceline.train.checkpoints import randomness
from paceline.train.checkpoints.exchange import Loaded, load
from paceline.train.checkpoints.lock import Lock
from paceline.train.checkpoints.pack import pack, unpack
from paceline.train.checkpoints.policy import Policy
from paceline.train.checkpoints.shelf import Shelf
from paceline.train.checkpoints.writer import Outcome, Snapshot, Writer
from paceline.train.comms import Comms
from paceline.train.loader import Progress
from paceline.train.pulse import Beat, Pulse
from paceline.train.signals import Notice
from paceline.train.update import Updater

_FORMAT = 1


class Stateful(Protocol):
    """Something whose state belongs into a checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


class Stopped(JobError):
    """The training was asked to stop, and its state is saved."""

    exit_code = 143  # as a process that SIGTERM ended


@dataclass
class Training:
    """What a checkpoint is made of.

    Attributes:
        updater: Module, optimizer, schedule and scaler.
        progress: Position in the data.
        seed: Of the run.
        extras: Further states by name.
        identity: What must be the same when the run goes on, by name.
    """

    updater: Updater
    progress: Progress
    seed: int
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)


class Keeper:
    """Makes checkpoints of a training; every rank has one and calls it in the same order.

    Args:
        training: What to keep.
        comms: Of all ranks; rank 0 writes.
        shelf: Where to.
        policy: When.
        keep: How many stay; 0 keeps all.
        tell: Called on rank 0 with an event's name and its details.
        before_save: Called on every rank before a state is taken.
        stop_when_full: Ends the training cleanly when a checkpoint could not be written.
    """

    def __init__(
        self,
        training: Training,
        comms: Comms,
        shelf: Shelf,
        policy: Policy,
        keep: int,
        tell: Callable[..., None],
        before_save: Callable[[], None],
        *,
        stop_when_full: bool = False,
    ) -> None:
        self._training, self._comms, self._shelf = training, comms, shelf
        self._policy, self._tell, self._stop_when_full = policy, tell, stop_when_full
        self._before_save = before_save
        self._writer = Writer(shelf, keep)
        self._lock = Lock(shelf.root, os.environ.get(jobenv.RUN_ID, ""))
        self._notice, self._pulse = Notice(), Pulse(comms)
        self._saved_at, self._saved_step = time.monotonic(), -1
        self._full = ""
        training.updater.before_step = self._writer.staging.wait

    # -- the start -----------------------------------------------------------------------

    def open(self, want: str) -> Loaded | None:
        """Takes the folder, goes on from the wanted checkpoint, and listens for signals.

        Raises:
            SettingError: Another job writes there, or the run was another one.
            DataError: The wanted checkpoint is not there or not intact.
        """
        self._comms.together(self._lock.take if self._comms.world.rank == 0 else _nothing)
        try:
            loaded = load(self._comms, want, self._shelf, self._warn)
            if loaded is None:
                self._set_aside()
            else:
                self._comms.together(lambda: check_identity(loaded, self._training.identity))
                restore(loaded, self._training, self._comms)
                self._saved_step = loaded.step
        except BaseException:
            self._lock.release()
            raise
        self._notice.open()
        return loaded

    def _warn(self, text: str) -> None:
        self._tell("checkpoint skipped", warning=text)

    def _set_aside(self) -> None:
        """A new beginning in an old folder leaves the old checkpoints, under another name."""
        if self._comms.world.rank == 0 and self._shelf.found()[0]:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            aside = self._shelf.root.with_name(f"{self._shelf.root.name}-before-{stamp}")
            self._shelf.root.rename(aside)
            self._lock.release()
            self._lock.take()

    # -- on the way ----------------------------------------------------------------------

    def after_step(self) -> None:
        """To be called after every global step; saves and stops when it is time.

        Raises:
            Stopped: After the state was saved.
        """
        if self._policy.due_by_step(self._training.progress.step):
            self.save()
        self.look_up()

    def look_up(self) -> None:
        """To be called also in evaluation, as often on every rank."""
        if self._pulse.tick():
            self._obey(self._pulse.beat(stop=self._wants_stop(), save=self._wants_save()))

    def after_epoch(self, best: bool) -> None:
        """To be called after each epoch and its evaluation."""
        if best or self._policy.epochs:
            self.save(best=best)

    def _wants_stop(self) -> bool:
        return bool(self._notice.stop or (self._full and self._stop_when_full))

    def _wants_save(self) -> bool:
        """By the clock of rank 0, which also gives its sign of life here."""
        self.report()
        self._lock.refresh()
        late = self._policy.due_by_time(time.monotonic() - self._saved_at)
        return self._notice.save or (self._comms.world.rank == 0 and late)

    def _obey(self, beat: Beat) -> None:
        if beat.save or beat.stop:
            self._notice.save = False
            self.save()
        if beat.stop:
            self._stop()

    def _stop(self) -> None:
        self._writer.wait()
        self.report()
        reasons = [text for text in self._comms.texts(self._notice.stop or self._full) if text]
        step = self._training.progress.step
        home = os.environ.get(jobenv.HOME_DIR) or str(self._shelf.root.parent)
        raise Stopped(
            f"stopped on {reasons[0] if reasons else 'request'} after step {step}",
            found=f"checkpoint of step {self._saved_step} in {home}",
            remedy=f"the same command with --run-dir {home} goes on from there",
        )

    def save(self, best: bool = False) -> None:
        """Makes a checkpoint of the present state; the training pays for the copy only."""
        if self._training.progress.step == self._saved_step and not best:
            return
        self._saved_step, self._saved_at = self._training.progress.step, time.monotonic()
        self._before_save()
        generators = self._comms.rows(randomness.capture(self._comms.device))
        snapshot = capture(self._training, self._comms, generators, best)
        if self._comms.world.rank == 0:
            self._writer.begin(snapshot)

    def report(self) -> None:
        """Tells how the saves since the last time ended."""
        while not self._writer.outcomes.empty():
            self._told(self._writer.outcomes.get())

    def _told(self, outcome: Outcome) -> None:
        if outcome.problem:
            self._full = outcome.problem
            self._tell("checkpoint failed", step=outcome.step, warning=outcome.problem)
        else:
            megabytes = round(outcome.bytes / 1e6, 3)
            seconds = round(outcome.seconds, 3)
            self._tell("checkpoint", step=outcome.step, megabytes=megabytes, seconds=seconds)

    # -- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for what is being written and lets the folder go."""
        self._writer.wait()
        self.report()
        self._notice.close()
        self._lock.release()


def _nothing() -> None:
    pass


def check_identity(loaded: Loaded, identity: Mapping[str, str]) -> None:
    """Refuses to go on with another training than the checkpoint's.

    Raises:
        SettingError: Names everything that differs.
    """
    recorded: dict[str, str] = loaded.state["identity"]
    differing = [
        f"{name}: {recorded[name]} then, {value} now"
        for name, value in identity.items()
        if name in recorded and recorded[name] != value
    ]
    if differing:
        raise SettingError(
            f"the checkpoint {loaded.source} is of another training",
            found="\n".join(differing),
            remedy="a --run-dir of its own for this one, --resume never, or the former settings",
        )


def capture(training: Training, comms: Comms, generators: Tensor, best: bool) -> Snapshot:
    """The state as it is; tensors are still the training's own."""
    updater, done = training.updater, training.progress
    rest: dict[str, Tensor] = {}
    state = {
        "format": _FORMAT,
        "progress": {"step": done.step, "epoch": done.epoch, "offset": done.offset},
        "ranks": comms.world.size,
        "seed": training.seed,
        "identity": dict(training.identity),
        "training": pack(updater.state(), rest, "training"),
        "extras": pack({k: v.state_dict() for k, v in training.extras.items()}, rest, "extras"),
    }
    weights = wrapping.whole_state(updater.module)
    return Snapshot(
        done.step,
        {
            "weights.safetensors": dict(weights),
            "optimizer.safetensors": rest,
            "random.safetensors": {str(rank): row for rank, row in enumerate(generators)},
        },
        frozenset(name for name, _ in updater.module.named_buffers()),
        (json.dumps(state, indent=1) + "\n").encode(),
        {"time": time.strftime("%FT%T%z"), "ranks": comms.world.size, "host": comms.world.host},
        best,
    )


def restore(loaded: Loaded, training: Training, comms: Comms) -> None:
    """Puts a training into a checkpoint's state, at whatever world size."""
    state, tensors = loaded.state, loaded.tensors
    rest = tensors["optimizer.safetensors"]
    wrapping.load_whole_state(training.updater.module, tensors["weights.safetensors"])
    training.updater.load_state(unpack(state["training"], rest))
    for name, kept in unpack(state["extras"], rest).items():
        if name in training.extras:
            training.extras[name].load_state_dict(kept)
    done = state["progress"]
    progress = training.progress
    progress.step, progress.epoch, progress.offset = done["step"], done["epoch"], done["offset"]
    _restore_generators(loaded, training, comms)


def _restore_generators(loaded: Loaded, training: Training, comms: Comms) -> None:
    rank = comms.world.rank
    if loaded.state["ranks"] == comms.world.size:
        randomness.restore(loaded.tensors["random.safetensors"][str(rank)], comms.device)
    else:  # other ranks have no state to go on from: new ones, but always the same
        torch.manual_seed(training.seed * 1_000_003 + loaded.step * 4_001 + rank)
