"""torchvision's classifiers by name, with its weights of ImageNet: ``--model torchvision/NAME``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import interpolate

from paceline.program import library
from paceline.recipes.argv import known
from paceline.recipes.pretrained import Origin, torch_file_here
from paceline.spec.errors import SettingError

PREFIX = "torchvision/"
_EXTRA_HEADS = ("googlenet", "inception_v3")  # outputs besides, for training only: left out
_ONLY_224 = ("maxvit_t",)


class TorchvisionImages(nn.Module):
    """One of them for images of any size and of one or three channels, with a head of its own.

    Args:
        name: The library's.
        model: Its last layer is taken off.
        classes: Outputs of the head.
    """

    def __init__(self, name: str, model: nn.Module, classes: int) -> None:
        super().__init__()
        place, last = _last_layer(name, model)
        owner, _, at = place.rpartition(".")
        setattr(model.get_submodule(owner), at, nn.Identity())
        self.name, self.model = name, model
        self.head = nn.Linear(last.in_features, classes)
        self.size: int | None = getattr(model, "image_size", 224 if name in _ONLY_224 else None)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        if self.size and images.shape[2:] != (self.size, self.size):
            images = interpolate(images.float(), (self.size,) * 2, mode="bilinear", antialias=True)
        logits: Tensor = self.head(self.model(images))
        return logits

    def describe(self) -> dict[str, Any]:
        """What :func:`rebuilt` needs."""
        return {"kind": "torchvision", "name": self.name, "size": self.size}


def _last_layer(name: str, model: nn.Module) -> tuple[str, nn.Linear]:
    layers = [(at, one) for at, one in model.named_modules() if isinstance(one, nn.Linear)]
    if not layers:
        raise SettingError(
            f"--model {PREFIX}{name}: it ends with no linear layer, so that no head can be put on",
            remedy=f"--model {PREFIX}mobilenet_v3_large",
        )
    return layers[-1]


def load(
    name: str, classes: Sequence[str], offline: bool, from_scratch: bool
) -> tuple[nn.Module, Origin]:
    """The model that ``torchvision/NAME`` means, with a head for these classes.

    Raises:
        SettingError: torchvision is not installed, or has no such classifier.
        DataError: Its weights are not here, and must not or cannot be fetched.
    """
    short, weights = name.removeprefix(PREFIX), weights_of(name)
    if from_scratch:
        return TorchvisionImages(short, _made(short), len(classes)), Origin()
    torch_file_here(weights.url.rpartition("/")[2], offline)
    model = _made(short, weights=weights)
    _, own = _last_layer(short, model)
    network = TorchvisionImages(short, model, len(classes))
    same = list(weights.meta.get("categories", ())) == [*classes]
    if same:
        network.head.load_state_dict(own.state_dict())
    return network, Origin(name, (), not same)


def weights_of(name: str) -> Any:
    """The library's description of the weights of ``torchvision/NAME``."""
    models = _models()
    names = {PREFIX + one: one for one in models.list_models(module=models)}
    known("--model", name, names)
    return models.get_model_weights(names[name]).DEFAULT


def preprocessing(name: str) -> dict[str, Any]:
    """How images were prepared, in the words of ``preprocessor_config.json``."""
    how = weights_of(name).transforms()
    return {"size": how.crop_size[0], "image_mean": how.mean, "image_std": how.std, "channels": 3}


def rebuilt(description: dict[str, Any], classes: int) -> nn.Module:
    """The network that :meth:`TorchvisionImages.describe` tells, with initial weights."""
    name, size = description["name"], description["size"]
    more = {"image_size": size} if size and name not in _ONLY_224 else {}
    return TorchvisionImages(name, _made(name, **more), classes)


def _made(name: str, **more: Any) -> nn.Module:
    if name in _EXTRA_HEADS:
        more |= {"aux_logits": False, **({} if "weights" in more else {"init_weights": True})}
    made: nn.Module = _models().get_model(name, **more)
    return made


def _models() -> Any:
    purpose = f"--model {PREFIX}NAME is loaded"
    return library(
        "torchvision", purpose, "pip install torchvision, of the release for this torch"
    ).models
