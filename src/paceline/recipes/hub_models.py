"""Classifiers of Hugging Face, by id or local folder. The library is imported on use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    def folder(self) -> bool:
        return Path(self.name).expanduser().is_dir()

    @property
    def local(self) -> bool:
        return self.offline or self.folder

    def check(self) -> None:
        """DataError for a path at which there is no folder: the hub has no such id."""
        path = Path(self.name).expanduser()
        an_id = self.name.count("/") <= 1 and not self.name.startswith(("/", "./", "../", "~"))
        if not path.is_dir() and (path.exists() or not an_id):
            raise DataError(
                f"--model {self.name} could not be loaded",
                found=f"there is no folder {path.absolute()}"
                + (", but a file" if path.exists() else ""),
                remedy="give the folder of a saved model, or the id of one on the hub: USER/NAME",
            )


def load_model(wanted: HubModel, classes: Sequence[str]) -> nn.Module:
    """The model with a head for these classes; a head of another size is made anew.

    Raises:
        DataError: Not found, refused, or no such classifier.
    """
    wanted.check()
    library = _library(wanted.kind, wanted.offline, wanted.folder)
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
    library = _library(kind, offline=False, folder=True)
    # timm's descriptions have their own word for it, and class names that may be another task's.
    count = {"num_labels": description["num_classes"]} if "num_classes" in description else {}
    kind_of_config = type(library.AutoConfig.for_model(description["model_type"]))
    config = kind_of_config.from_dict(dict(description), **count)
    made: nn.Module = getattr(library, _CLASSES[kind]).from_config(config)
    return made.float()


def description(model: Any) -> dict[str, Any]:
    """What :func:`rebuilt` needs, as JSON values."""
    found: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return found


def load_tokenizer(wanted: HubModel) -> Any:
    """The tokenizer that belongs to the model."""
    wanted.check()
    library = _library(wanted.kind, wanted.offline, wanted.folder)

    def get() -> Any:
        return library.AutoTokenizer.from_pretrained(wanted.source, local_files_only=wanted.local)

    return fetched(f"the tokenizer of --model {wanted.name}", get)


def load_preprocessing(wanted: HubModel) -> dict[str, Any]:
    """How images are prepared for the model, in the words of ``preprocessor_config.json``.

    Models of timm have no such file, but a part of their description; empty where nothing is said.
    """
    return _content(wanted, "preprocessor_config.json") or of_timm(_content(wanted, "config.json"))


def of_timm(description: Mapping[str, Any]) -> dict[str, Any]:
    """The preprocessing that timm's models carry in their description."""
    carried = description.get("pretrained_cfg") or {}
    names = {"image_mean": "mean", "image_std": "std"}
    found = {ours: carried[theirs] for ours, theirs in names.items() if theirs in carried}
    return found | ({"size": carried["input_size"][-1]} if "input_size" in carried else {})


def _content(wanted: HubModel, name: str) -> dict[str, Any]:
    """A JSON file of the model; empty when it has none of that name."""
    wanted.check()
    path = Path(wanted.name).expanduser() / name
    if not path.parent.is_dir():
        prepare_environment(wanted.offline)
        hub = optional.library("transformers.utils", "models are loaded")
        found = fetched(
            f"--model {wanted.name}",
            lambda: hub.cached_file(
                wanted.name,
                name,
                local_files_only=wanted.local,
                _raise_exceptions_for_missing_entries=False,
            ),
        )
        path = Path(found) if found else path
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _library(kind: Kind, offline: bool, folder: bool = False) -> Any:
    prepare_environment(offline, folder)
    library = optional.library("transformers", f"Hugging Face's {kind} models are loaded")
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library
