"""Pretrained models that others publish: what can be had where, and what is on this disk already.

Nothing here imports torch, and nothing asks a network: the figures are the publishers'.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.spec import rundir

IMAGENET = "imagenet"
"""As in ``--weights imagenet``."""
TORCHVISION = "https://download.pytorch.org/models/"
_FILES_OF_TORCHVISION = {
    "torchvision/mobilenet_v3_large": "mobilenet_v3_large-5c1a4163.pth",
    "torchvision/efficientnet_b0": "efficientnet_b0_rwightman-7f5810bc.pth",
    "torchvision/efficientnet_v2_s": "efficientnet_v2_s-dd5fe13b.pth",
    "torchvision/convnext_tiny": "convnext_tiny-983f1562.pth",
    "torchvision/vit_b_16": "vit_b_16-c867db91.pth",
}
FILES = {
    "resnet18": "resnet18-f37072fd.pth",
    "resnet34": "resnet34-b627a593.pth",
    "resnet50": "resnet50-0676ba61.pth",
}
"""torchvision's first weights of ImageNet for our networks, by model; the name ends with the
beginning of the file's SHA-256."""
AS_TRAINED: Mapping[str, Any] = {
    "size": 224,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "channels": 3,
}
"""How images were prepared for them, in the words of ``preprocessor_config.json``."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model with weights.

    Attributes:
        name: Id on the hub, or the name of a network of ours.
        recipe: That trains it further.
        flags: To be typed.
        source: ``torchvision``, ``timm``, ``hub`` or ``run``.
        parameters: In millions, of backbone and head; 0 where it is not known.
        megabytes: To be downloaded, about 4 bytes a parameter; 0 for nothing.
        image_size: Height and width that it was trained with; 0 for texts, or not known.
        licence: Of the weights; empty where it is not known.
        needs: Libraries besides those of the recipes.
        state: Filled in by :func:`pretrained`.
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
        """What people want to know, besides the flags."""
        size = f"{self.image_size}×{self.image_size}" if self.image_size else ""
        millions = f"{self.parameters:g} million parameters" if self.parameters else ""
        return ", ".join(filter(None, (millions, size, self.licence, self.source, self.state)))


def _hub(recipe: str, name: str, millions: float, size: int, licence: str) -> Pretrained:
    timm = name.startswith("timm/")
    source, needs = ("timm", ("timm", "torchvision")) if timm else ("hub", ())
    flags = f"--model {name}"
    return Pretrained(
        name, recipe, flags, source, millions, round(4 * millions), size, licence, needs
    )


def _torchvision(name: str, millions: float) -> Pretrained:
    flags = f"--model {name} --weights {IMAGENET}"
    return Pretrained(
        name, "image", flags, "torchvision", millions, round(4 * millions), 224, "BSD-3-Clause"
    )


def _of_torchvision(name: str, millions: float, size: int) -> Pretrained:
    whole = f"torchvision/{name}"
    return Pretrained(
        whole, "image", f"--model {whole}", "torchvision", millions, round(4 * millions), size,
        "BSD-3-Clause", ("torchvision",),
    )  # fmt: skip


APACHE = "Apache-2.0"
KNOWN = (
    _torchvision("resnet18", 11.7),
    _torchvision("resnet34", 21.8),
    _torchvision("resnet50", 25.6),
    *(
        _of_torchvision(name, millions, size)
        for name, millions, size in (
            ("mobilenet_v3_large", 5.5, 224),
            ("efficientnet_b0", 5.3, 224),
            ("efficientnet_v2_s", 21.5, 384),
            ("convnext_tiny", 28.6, 224),
            ("vit_b_16", 86.6, 224),
        )
    ),
    _hub("image", "microsoft/resnet-18", 11.7, 224, APACHE),
    _hub("image", "microsoft/resnet-50", 25.6, 224, APACHE),
    _hub("image", "google/vit-base-patch16-224", 86.6, 224, APACHE),
    _hub("image", "facebook/deit-small-patch16-224", 22.1, 224, APACHE),
    _hub("image", "facebook/convnext-tiny-224", 28.6, 224, APACHE),
    _hub("image", "microsoft/swin-tiny-patch4-window7-224", 28.3, 224, APACHE),
    _hub("image", "timm/resnet50.a1_in1k", 25.6, 224, APACHE),
    _hub("image", "timm/efficientnet_b0.ra_in1k", 5.3, 224, APACHE),
    _hub("text", "distilbert/distilbert-base-uncased", 67.0, 0, APACHE),
    _hub("text", "distilbert/distilroberta-base", 82.1, 0, APACHE),
    _hub("text", "google-bert/bert-base-uncased", 109.5, 0, APACHE),
    _hub("text", "FacebookAI/roberta-base", 124.6, 0, "MIT"),
)
"""Some that are much used; other classifiers of the hub and of torchvision have the same form."""


def torch_file(name: str) -> Path:
    """Where torch keeps such a file, on every disk once."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(os.environ.get("TORCH_HOME") or f"{cache}/torch").expanduser()
    return home / "hub" / "checkpoints" / name


def hub_cache() -> Path:
    """Where the hub's library keeps what it has fetched."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def pretrained(runs: Path = Path(rundir.DEFAULT_PARENT)) -> list[Pretrained]:
    """Known models, then others in the hub's cache, then what was trained here.

    Args:
        runs: Folder of run directories.
    """
    cached = _cached()
    found = [replace(one, state=_state(one, cached)) for one in KNOWN]
    names = {one.name for one in KNOWN}
    for name, recipe in cached.items():
        if recipe and name not in names:
            flags = f"--model {name}"
            found.append(Pretrained(name, recipe, flags, "hub", state="on this disk"))
    return [*found, *_trained(runs)]


def _state(one: Pretrained, cached: Mapping[str, str]) -> str:
    missing = [name for name in one.needs if importlib.util.find_spec(name) is None]
    if one.source == "torchvision":
        here = torch_file((FILES | _FILES_OF_TORCHVISION)[one.name]).is_file()
    else:
        here = one.name in cached or Path(one.name).is_dir()
    where = "on this disk" if here else f"{one.megabytes} MB to be downloaded"
    return f"{where}, needs pip install {' '.join(missing)}" if missing else where


_RECIPES = {"ForImageClassification": "image", "ForSequenceClassification": "text"}


def _cached() -> dict[str, str]:
    """Ids in the hub's cache whose weights are there, with the recipe that takes them, if any."""
    found = {}
    for folder in sorted(hub_cache().glob("models--*--*")):
        weights = [*folder.glob("snapshots/*/*.safetensors"), *folder.glob("snapshots/*/*.bin")]
        described = next(iter(folder.glob("snapshots/*/config.json")), None)
        if weights and described is not None:
            name = folder.name.removeprefix("models--").replace("--", "/")
            kinds = _content(described).get("architectures") or [""]
            ends = (recipe for end, recipe in _RECIPES.items() if str(kinds[0]).endswith(end))
            found[name] = next(ends, "")
    return found


def _trained(runs: Path) -> Iterator[Pretrained]:
    """The runs in a folder that ``--weights`` takes."""
    for path in sorted(runs.glob(f"*/{rundir.MODEL_CONFIG}")):
        content, run = _content(path), path.parents[1]
        model, recipe = str(content.get("model", "")), content.get("task")
        if recipe not in ("image", "text") or "/" in model:
            continue
        shape = content.get("shape")
        size = shape[1] if isinstance(shape, list) and len(shape) == 3 else 0
        yield Pretrained(
            model, recipe, f"--model {model} --weights {run}", "run", image_size=size,
            state="on this disk",
        )  # fmt: skip


def _content(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
