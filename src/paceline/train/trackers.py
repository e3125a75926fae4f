"""Experiment trackers: imported on use, and never in the way of the training.

A tracker is a class here that is made from :class:`RunInfo`, and one line in :data:`TRACKERS`. Each
is fed by a :class:`TrackerThread`, so that neither it nor the training waits for the other.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.train import files

QUEUE_LENGTH = 1000
MAX_FAILURES = 3
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RunInfo:
    """Description of the run for trackers.

    Attributes:
        project: Name under which runs are collected.
        run_id: Identity in the tracker; given again when the run is resumed. Empty
            when the tracker is to choose.
        group: Common name of the runs of all nodes; empty where one run stands for all.
        resumed_at: Step after which records that an earlier process may have sent are void; -1
            when every earlier record stands.
    """

    folder: Path
    project: str
    name: str
    run_id: str = ""
    group: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed_at: int = -1


class Tracker(Protocol):
    """Where measured values go."""

    @property
    def run_id(self) -> str:
        """Identity of the run, to be given again after a resume; may be empty."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the values of a global step, by names such as ``train/loss``."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard: event files in ``RUN/tensorboard``, one series for each value."""

    run_id = ""

    def __init__(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = info.folder / "tensorboard" / (info.name if info.group else "")
        # Hides what an interrupted process recorded on another host after the checkpoint.
        purge = info.resumed_at + 1 if info.resumed_at >= 0 else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases, also offline (``WANDB_MODE=offline``): one run, continued under its id.

    The key comes from its own settings. With a server that does not answer when the run begins it
    is kept as offline, for ``wandb sync``.
    """

    def __init__(self, info: RunInfo) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        self.run_id = info.run_id or secrets.token_hex(4)
        self._run: Any = None
        try:
            self._run = self._init_run(wandb, info)
        except wandb.errors.CommError as error:  # after WANDB_INIT_TIMEOUT, 90 s by default
            wandb.teardown()  # its service would take the run for one in use
            self._run = self._init_run(wandb, info, mode="offline")
            reason, folder = str(error).partition("\n")[0], Path(self._run.dir).parent
            self.note = f"no server ({reason}): kept offline, to be sent by: wandb sync {folder}"

    def _init_run(self, wandb: Any, info: RunInfo, **options: str) -> Any:
        return wandb.init(
            project=info.project,
            id=self.run_id,
            name=info.name,
            group=info.group or None,
            dir=str(info.folder),
            config=dict(info.config),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
            **options,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow: at ``MLFLOW_TRACKING_URI``, or in the run directory without a server."""

    def __init__(self, info: RunInfo) -> None:
        from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

        uri = os.environ.get("MLFLOW_TRACKING_URI") or _local(info.folder.absolute())
        self._client: Any = MlflowClient(tracking_uri=uri)
        self.run_id = info.run_id or self._create_run(info)

    def _create_run(self, info: RunInfo) -> str:
        experiment = self._client.get_experiment_by_name(info.project)
        number = experiment.experiment_id if experiment else None
        run = self._client.create_run(
            number or self._client.create_experiment(info.project),
            run_name=info.name,
            tags={"group": info.group} if info.group else None,
        )
        for name, value in info.config.items():
            self._client.log_param(run.info.run_id, name, value)
        return str(run.info.run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self.run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


def _local(folder: Path) -> str:
    """A database file where MLflow is installed whole; plain files with its small edition."""
    if importlib.util.find_spec("sqlalchemy"):
        return f"sqlite:///{folder / 'mlflow.db'}"
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return (folder / "mlruns").as_uri()


class Trackio:
    """Trackio: local; one run, continued under its name."""

    def __init__(self, info: RunInfo) -> None:
        import trackio  # type: ignore[import-not-found, unused-ignore]

        self.run_id = info.run_id or info.name
        self._run = trackio.init(
            project=info.project,
            name=self.run_id,
            group=info.group or None,
            config=dict(info.config),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[RunInfo], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


@dataclass(frozen=True, slots=True)
class Record:
    """Values of one step of one split."""

    split: str
    step: int
    values: Mapping[str, float]


class TrackerThread:
    """Feeds one tracker from a thread of its own.

    What it raises is told once; after three failures in a row it is left alone. A record that
    was sent before an interruption is not sent again.

    Args:
        open_it: Makes the tracker, given the id of its run (empty at first); may fail or block.
        notes: File that remembers the run's id and what was sent.
        warn: Told what went wrong; called from the thread.
        resumed: The run is a resumed one: its notes count.
    """

    def __init__(
        self,
        name: str,
        open_it: Callable[[str], Tracker],
        notes: Path,
        warn: Callable[[str], None],
        *,
        resumed: bool,
    ) -> None:
        self._name, self._open, self._notes, self._warn = name, open_it, notes, warn
        notes_content = _read_notes(notes) if resumed else {}
        self._run_id = str(notes_content.get("run_id", ""))
        self._sent: dict[str, int] = dict(notes_content.get("sent", {}))
        self._failures, self._lost = 0, False
        self._records: queue.Queue[Record | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._work, name=f"paceline-{name}", daemon=True)
        self._thread.start()

    def submit(self, record: Record) -> None:
        """Queues a record; never waits. With a full queue the record is lost."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            if not self._lost:
                self._warn(f"{self._name} is too slow: some records are lost")
            self._lost = True

    def close(self, seconds: float = CLOSE_TIMEOUT_S) -> None:
        """Waits a limited time for queued records."""
        with contextlib.suppress(queue.Full):
            self._records.put(None, timeout=seconds)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f"{self._name} did not finish within {seconds:g} s: left behind")

    def _work(self) -> None:
        tracker = self._try(lambda: self._open(self._run_id))
        if tracker is not None:
            self._run_id = tracker.run_id
            if note := getattr(tracker, "note", ""):
                self._warn(f"{self._name}: {note}")
        while (record := self._records.get()) is not None:
            if tracker is not None and self._failures < MAX_FAILURES:
                self._send(tracker, record)
        if tracker is not None:
            self._try(tracker.close)

    def _send(self, tracker: Tracker, record: Record) -> None:
        if record.step <= self._sent.get(record.split, -1):
            return
        values = {f"{record.split}/{name}": value for name, value in record.values.items()}

        def send() -> bool:
            tracker.log(record.step, values)
            return True

        if self._try(send):
            self._sent[record.split] = record.step
            self._note()

    def _note(self) -> None:
        content = json.dumps({"run_id": self._run_id, "sent": self._sent}).encode()
        with contextlib.suppress(OSError):
            files.write_bytes(self._notes, content, durable=False)

    def _try(self, act: Callable[[], Any]) -> Any:
        try:
            result = act()
        except Exception as error:
            self._failures += 1
            if self._failures in (1, MAX_FAILURES):
                suffix = ": no more records for it" if self._failures == MAX_FAILURES else ""
                self._warn(f"{self._name}: {type(error).__name__}: {error}{suffix}")
            return None
        self._failures = 0
        return result


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    floats = {name: float(v) for name, v in values.items() if isinstance(v, (int, float))}
    return {name: value for name, value in floats.items() if math.isfinite(value)}


def _read_notes(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(files.read_bytes_limited(path))
        return content if isinstance(content, dict) else {}
    return {}
