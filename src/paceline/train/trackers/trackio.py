"""Trackio: local, under the same name after a resume."""

from __future__ import annotations

from collections.abc import Mapping

import trackio  # type: ignore[import-not-found, unused-ignore]

from paceline.train.trackers import About


class Trackio:
    """One run, continued under its name."""

    def __init__(self, about: About) -> None:
        self.run_id = about.run_id or about.name
        self._run = trackio.init(
            project=about.project,
            name=self.run_id,
            group=about.group or None,
            config=dict(about.config),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def open(about: About) -> Trackio:
    """Begins or resumes a run."""
    return Trackio(about)
