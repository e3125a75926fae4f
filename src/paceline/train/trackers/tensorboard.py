"""TensorBoard: event files in ``RUN/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from paceline.train.trackers import About


class TensorBoard:
    """One series for each value."""

    run_id = ""

    def __init__(self, about: About) -> None:
        folder = about.folder / "tensorboard" / (about.name if about.group else "")
        # Hides what an interrupted process recorded on another machine after the checkpoint.
        purge = about.resumed_at + 1 if about.resumed_at >= 0 else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open(about: About) -> TensorBoard:
    """Begins or resumes the event files."""
    return TensorBoard(about)
