"""MLflow: at ``MLFLOW_TRACKING_URI``, or in the run directory without a server."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

from paceline.train.trackers import About


class Mlflow:
    """One run, continued under its id."""

    def __init__(self, about: About) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or _local(about.folder.absolute())
        self._client: Any = MlflowClient(tracking_uri=uri)
        self.run_id = about.run_id or self._new(about)

    def _new(self, about: About) -> str:
        experiment = self._client.get_experiment_by_name(about.project)
        number = experiment.experiment_id if experiment else None
        run = self._client.create_run(
            number or self._client.create_experiment(about.project),
            run_name=about.name,
            tags={"group": about.group} if about.group else None,
        )
        for name, value in about.config.items():
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


def open(about: About) -> Mlflow:
    """Begins or resumes a run."""
    return Mlflow(about)
