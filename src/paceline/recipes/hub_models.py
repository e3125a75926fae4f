"""Classifiers of Hugging Face, by id or local folder. The library is imported on use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from paceline.recipes import optional
from paceline.recipes.datasets.hub import fetched, prepare_environment
from paceline.spec.errors import DataError

Kind = Literal["text", "image"]
_CLASSES = {
    "text": "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
}


@dataclass(frozen=True, slots=True)
class HubModel:
    """Which model.

    Attributes:
        kind: What it classifies.
        name: Id (``user/name``) or folder.
        offline: Whether the network must not be touched.
        from_scratch: Takes the architecture, and new weights.
    """

    kind: Kind
    name: str
    offline: bool = False
    from_scratch: bool = False

    @property
    def source(self) -> str:
        """What the library is given."""
        path = Path(self.name).expanduser()
        return str(path) if path.is_dir() else self.name

    @property
    def local(self) -> bool:
        return self.offline or Path(self.name).expanduser().is_dir()


def load_model(wanted: HubModel, classes: Sequence[str]) -> nn.Module:
    """The model with a head for these classes; a head of another size is made anew.

    Raises:
        DataError: Not found, refused, or no such classifier.
    """
    library = _library(wanted.kind, wanted.offline)
    kind = getattr(library, _CLASSES[wanted.kind])
    names: dict[str, Any] = {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }

    def get() -> nn.Module:
        only = wanted.local
        if wanted.from_scratch:
            found = library.AutoConfig.from_pretrained(
                wanted.source, local_files_only=only, **names
            )
            made: nn.Module = kind.from_config(found)
            return made
        loaded: nn.Module = kind.from_pretrained(
            wanted.source, local_files_only=only, ignore_mismatched_sizes=True, **names
        )
        return loaded

    return _checked(wanted, fetched(f"--model {wanted.name}", get))


def _checked(wanted: HubModel, model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise DataError(f"--model {wanted.name} is no {wanted.kind} classifier")
    return model.float()


def rebuilt(kind: Kind, description: dict[str, Any]) -> nn.Module:
    """The architecture that a saved description tells, with initial weights; nothing is fetched."""
    library = _library(kind, offline=True)
    rest = dict(description)
    name = rest.pop("model_type")
    config = library.AutoConfig.for_model(name, **rest)
    made: nn.Module = getattr(library, _CLASSES[kind]).from_config(config)
    return made.float()


def description(model: Any) -> dict[str, Any]:
    """What :func:`rebuilt` needs, as JSON values."""
    found: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return found


def load_tokenizer(wanted: HubModel) -> Any:
    """The tokenizer that belongs to the model."""
    library = _library(wanted.kind, wanted.offline)

    def get() -> Any:
        return library.AutoTokenizer.from_pretrained(wanted.source, local_files_only=wanted.local)

    return fetched(f"the tokenizer of --model {wanted.name}", get)


def load_preprocessing(wanted: HubModel) -> dict[str, Any]:
    """How images are prepared for the model: its ``preprocessor_config.json``, or nothing."""
    path = Path(wanted.name).expanduser() / "preprocessor_config.json"
    if not path.parent.is_dir():
        hub = optional.library("transformers.utils", "models are loaded")
        found = fetched(
            f"--model {wanted.name}",
            lambda: hub.cached_file(
                wanted.name,
                "preprocessor_config.json",
                local_files_only=wanted.local,
                _raise_exceptions_for_missing_entries=False,
            ),
        )
        path = Path(found) if found else path
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _library(kind: Kind, offline: bool) -> Any:
    prepare_environment(offline)
    library = optional.library("transformers", f"Hugging Face's {kind} models are loaded")
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library
