"""Settings of evaluation and prediction. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from paceline.recipes.options import Backend, Device


@dataclass(frozen=True)
class EvaluateOptions:
    """Evaluate a trained model on its held-out data, or on others."""

    run: str = ""
    """Run directory that holds model/."""
    split: str = ""
    """train, val or test (default: the part that the training reported)."""
    data: str = ""
    """Other data than the model was trained on: a name or a folder."""
    target: str = ""
    """The other file of a corpus of two files, beside --data."""
    data_dir: str = ""
    """Folder that holds the files of the named data set (default: the usual places)."""
    device: Device = "auto"
    """Where to compute."""
    backend: Backend = "auto"
    """Communication backend."""
    json: str = ""
    """File to which the figures are also written, as JSON."""


@dataclass(frozen=True)
class PredictOptions:
    """Tell the class of images or texts."""

    inputs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Image files and folders of images; or texts, and csv, tsv and txt files of texts."""
    run: str = ""
    """Run directory that holds model/."""
    top_k: int = 3
    """Classes shown for each input."""
    json: bool = False
    """One JSON object a line."""
    device: Device = "auto"
    """Where to compute."""


@dataclass(frozen=True)
class TranslateOptions:
    """Translate sentences; without any, the lines of standard input."""

    sentences: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Sentences."""
    run: str = ""
    """Run directory that holds model/."""
    beam: int = 0
    """Beams of the search (0: as in the training; 1: greedy)."""
    attention: str = ""
    """File for a picture of the first sentence's attention (PNG)."""
    device: Device = "auto"
    """Where to compute."""
