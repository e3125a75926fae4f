"""Scripts of ``recipes.use`` that use the trained model of a run."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path
from typing import NoReturn

from paceline.cli.verb import say
from paceline.spec.errors import SettingError
from paceline.spec.rundir import DEFAULT_PARENT, MODEL_CONFIG
from paceline.spec.training.used_weights import usable_checkpoint

SCRIPTS = "paceline.recipes.use"


def model_folder(run: Path) -> Path:
    """Returns the run directory, as named or below runs/.

    Raises:
        SettingError: It has neither a model nor a checkpoint.
    """
    candidate = Path(DEFAULT_PARENT, run)
    folder = (candidate if not run.exists() and candidate.is_dir() else run).absolute()
    if (folder / MODEL_CONFIG).is_file():
        return folder
    if (checkpoint := usable_checkpoint(folder)) is not None:
        say(f"{run} has no finished model: using its checkpoint {checkpoint.name}", err=True)
        return folder
    raise SettingError(
        f"{run} holds no trained model",
        found=f"no {folder / MODEL_CONFIG}, and no checkpoint",
        remedy="Name the run directory that `paceline train` printed",
    )


def run_script(script: str, argv: list[str]) -> NoReturn:
    """Runs a script of ``recipes.use`` and exits with its status.

    It runs in this process: ``python -m`` would import from the current folder, which may be a run
    directory with files of hosts.
    """
    gc.disable()  # an import makes many objects and hardly any garbage
    module = importlib.import_module(f"{SCRIPTS}.{script}")
    gc.freeze()
    gc.enable()
    status = module.main(argv=argv)
    gc.freeze()  # so that the interpreter's exit does not search all of torch for garbage
    sys.exit(status)
