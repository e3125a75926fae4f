"""List of pretrained models for ``paceline list models``. Needs neither torch nor the network."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.spec import rundir

IMAGENET = "imagenet"
"""Value of ``--weights``."""
TORCHVISION_PREFIX = "torchvision/"
"""Begins the name of a model of torchvision."""
TORCHVISION = "https://download.pytorch.org/models/"
_TORCHVISION_FILES = {
    "torchvision/mobilenet_v3_large": "mobilenet_v3_large-5c1a4163.pth",
    "torchvision/efficientnet_b0": "efficientnet_b0_rwightman-7f5810bc.pth",
    "torchvision/efficientnet_v2_s": "efficientnet_v2_s-dd5fe13b.pth",
    "torchvision/convnext_tiny": "convnext_tiny-983f1562.pth",
    "torchvision/vit_b_16": "vit_b_16-c867db91.pth",
}
RESNET_FILES = {
    "resnet18": "resnet18-f37072fd.pth",
    "resnet34": "resnet34-b627a593.pth",
    "resnet50": "resnet50-0676ba61.pth",
}
"""torchvision's IMAGENET1K_V1 weights for the built-in networks."""
IMAGENET_PREPROCESSING: Mapping[str, Any] = {
    "size": 224,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "channels": 3,
}
"""Preprocessing for these weights, with the keys of ``preprocessor_config.json``."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A pretrained model.

    Attributes:
        name: Id on the hub, or name of a built-in network.
        source: ``torchvision``, ``timm``, ``hub`` or ``run``.
        parameters: Parameters in millions, with head; 0 if unknown.
        megabytes: Size of the download, about 4 bytes a parameter; 0 for none.
        image_size: Height and width of its training images; 0 for texts, or unknown.
        licence: Licence of the weights; empty if unknown.
        needs: Libraries besides those of the recipes.
        state: Whether it is on this disk, filled in by :func:`list_pretrained`.
    """

    name: str
    recipe: str
    flags: str
    source: str
    parameters: float = 0.0
    megabytes: int = 0
    image_size: int = 0
    licence: str = ""
    needs: tuple[str, ...] = ()
    state: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"kind": "pretrained", **asdict(self), "needs": [*self.needs]}

    def line(self) -> str:
        """Returns a one-line description, without the flags."""
        size = f"{self.image_size}×{self.image_size}" if self.image_size else ""
        millions = f"{self.parameters:g} million parameters" if self.parameters else ""
        return ", ".join(filter(None, (millions, size, self.licence, self.source, self.state)))


def _popular(
    recipe: str, name: str, millions: float, size: int = 0, licence: str = "Apache-2.0"
) -> Pretrained:
    flags, source = f"--model {name}", "hub"
    needs: tuple[str, ...] = ()
    if name in RESNET_FILES:
        flags, source, licence = f"{flags} --weights {IMAGENET}", "torchvision", "BSD-3-Clause"
    elif name in _TORCHVISION_FILES:
        source, licence, needs = "torchvision", "BSD-3-Clause", ("torchvision",)
    elif name.startswith("timm/"):
        source, needs = "timm", ("timm", "torchvision")
    megabytes = round(4 * millions)
    return Pretrained(name, recipe, flags, source, millions, megabytes, size, licence, needs)


POPULAR = (
    _popular("image", "resnet18", 11.7, 224),
    _popular("image", "resnet34", 21.8, 224),
    _popular("image", "resnet50", 25.6, 224),
    _popular("image", "torchvision/mobilenet_v3_large", 5.5, 224),
    _popular("image", "torchvision/efficientnet_b0", 5.3, 224),
    _popular("image", "torchvision/efficientnet_v2_s", 21.5, 384),
    _popular("image", "torchvision/convnext_tiny", 28.6, 224),
    _popular("image", "torchvision/vit_b_16", 86.6, 224),
    _popular("image", "microsoft/resnet-18", 11.7, 224),
    _popular("image", "microsoft/resnet-50", 25.6, 224),
    _popular("image", "google/vit-base-patch16-224", 86.6, 224),
    _popular("image", "facebook/deit-small-patch16-224", 22.1, 224),
    _popular("image", "facebook/convnext-tiny-224", 28.6, 224),
    _popular("image", "microsoft/swin-tiny-patch4-window7-224", 28.3, 224),
    _popular("image", "timm/resnet50.a1_in1k", 25.6, 224),
    _popular("image", "timm/efficientnet_b0.ra_in1k", 5.3, 224),
    _popular("text", "distilbert/distilbert-base-uncased", 67.0),
    _popular("text", "distilbert/distilroberta-base", 82.1),
    _popular("text", "google-bert/bert-base-uncased", 109.5),
    _popular("text", "FacebookAI/roberta-base", 124.6, licence="MIT"),
)
"""Popular models; all other classifiers of the hub and of torchvision work, too."""


def torch_file(name: str) -> Path:
    """Returns the path of a file in torch's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(os.environ.get("TORCH_HOME") or f"{cache}/torch").expanduser()
    return root / "hub" / "checkpoints" / name


def hub_cache() -> Path:
    """Returns the cache of the hub's library."""
    root = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{root}/hub").expanduser()


def list_pretrained(
    read_object: Callable[[Path], Mapping[str, Any] | None],
    runs: Path = Path(rundir.DEFAULT_PARENT),
) -> list[Pretrained]:
    """Lists popular models, then others in the hub's cache, then runs in the folder ``runs``.

    Args:
        read_object: Reads a JSON file of a run, which may come from a stranger; ranks have none.
    """
    cached = _cached_models()
    models = [replace(model, state=_state(model, cached)) for model in POPULAR]
    names = {model.name for model in POPULAR}
    for name, recipe in cached.items():
        if recipe and name not in names:
            flags = f"--model {name}"
            models.append(Pretrained(name, recipe, flags, "hub", state="on this disk"))
    return [*models, *_trained_runs(runs, read_object)]


def _state(model: Pretrained, cached: Mapping[str, str]) -> str:
    missing = [name for name in model.needs if importlib.util.find_spec(name) is None]
    if model.source == "torchvision":
        is_local = torch_file((RESNET_FILES | _TORCHVISION_FILES)[model.name]).is_file()
    else:
        is_local = model.name in cached or Path(model.name).is_dir()
    location = "on this disk" if is_local else f"{model.megabytes} MB to be downloaded"
    return f"{location}, needs pip install {' '.join(missing)}" if missing else location


_RECIPES = {"ForImageClassification": "image", "ForSequenceClassification": "text"}


def _cached_models() -> dict[str, str]:
    """Returns the models with weights in the hub's cache, and the recipe of each."""
    models = {}
    for folder in sorted(hub_cache().glob("models--*--*")):
        weights = [*folder.glob("snapshots/*/*.safetensors"), *folder.glob("snapshots/*/*.bin")]
        described = next(iter(folder.glob("snapshots/*/config.json")), None)
        if weights and described is not None:
            name = folder.name.removeprefix("models--").replace("--", "/")
            kinds = _read_json(described).get("architectures") or [""]
            recipes = (recipe for end, recipe in _RECIPES.items() if str(kinds[0]).endswith(end))
            models[name] = next(recipes, "")
    return models


def _trained_runs(
    runs: Path, read_object: Callable[[Path], Mapping[str, Any] | None]
) -> Iterator[Pretrained]:
    """Lists the runs in a folder that ``--weights`` accepts."""
    for path in sorted(runs.glob(f"*/{rundir.MODEL_CONFIG}")):
        content, run = _read_json(path), path.parents[1]
        model, recipe = str(content.get("model", "")), content.get("task")
        if recipe not in ("image", "text") or "/" in model:
            continue
        shape = content.get("shape")
        size = shape[1] if isinstance(shape, list) and len(shape) == 3 else 0
        yield Pretrained(
            model, recipe, f"--model {model} --weights {run}", "run", image_size=size,
            state="on this disk",
        )  # fmt: skip


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
