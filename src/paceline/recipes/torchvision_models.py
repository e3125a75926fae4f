"""torchvision's classifiers by name, with its weights of ImageNet: ``--model torchvision/NAME``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import interpolate

from paceline.program import library
from paceline.recipes.argv import check_known
from paceline.recipes.pretrained import Origin, ensure_torch_file
from paceline.recipes.pretrained_list import TORCHVISION_PREFIX as PREFIX
from paceline.spec.errors import SettingError

_EXTRA_HEADS = ("googlenet", "inception_v3")  # auxiliary outputs for training are left out
_ONLY_224 = ("maxvit_t",)


class TorchvisionImages(nn.Module):
    """A model of torchvision with a new head, for images of any size and one or three channels.

    Args:
        model: Model, whose last layer is removed.
    """

    def __init__(self, name: str, model: nn.Module, classes: int) -> None:
        super().__init__()
        path, output = _output_layer(name, model)
        owner, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Identity())
        self.name, self.model = name, model
        self.head = nn.Linear(output.in_features, classes)
        self.size: int | None = getattr(model, "image_size", 224 if name in _ONLY_224 else None)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        if self.size and images.shape[2:] != (self.size, self.size):
            images = interpolate(images.float(), (self.size,) * 2, mode="bilinear", antialias=True)
        logits: Tensor = self.head(self.model(images))
        return logits

    def describe(self) -> dict[str, Any]:
        """Returns what :func:`build_from_description` needs."""
        return {"kind": "torchvision", "name": self.name, "size": self.size}


def _output_layer(name: str, model: nn.Module) -> tuple[str, nn.Linear]:
    layers = [(at, module) for at, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise SettingError(
            f"--model {PREFIX}{name}: it ends with no linear layer, so that no head can be put on",
            remedy=f"--model {PREFIX}mobilenet_v3_large",
        )
    return layers[-1]


def load(
    name: str, classes: Sequence[str], offline: bool, from_scratch: bool
) -> tuple[nn.Module, Origin]:
    """Loads the model ``torchvision/NAME`` with a head for the given classes.

    Raises:
        SettingError: torchvision is not installed, or has no such classifier.
        DataError: Its weights are missing and cannot be downloaded.
    """
    base_name, weights = name.removeprefix(PREFIX), weights_of(name)
    if from_scratch:
        return TorchvisionImages(base_name, _make_model(base_name), len(classes)), Origin()
    ensure_torch_file(weights.url.rpartition("/")[2], offline)
    model = _make_model(base_name, weights=weights)
    _, output = _output_layer(base_name, model)
    network = TorchvisionImages(base_name, model, len(classes))
    keeps_head = list(weights.meta.get("categories", ())) == [*classes]
    if keeps_head:
        network.head.load_state_dict(output.state_dict())
    return network, Origin(name, (), not keeps_head)


def weights_of(name: str) -> Any:
    """Returns the library's description of the weights of ``torchvision/NAME``."""
    models = _models()
    names = {PREFIX + base_name: base_name for base_name in models.list_models(module=models)}
    check_known("--model", name, names)
    return models.get_model_weights(names[name]).DEFAULT


def preprocessing(name: str) -> dict[str, Any]:
    """Returns the preprocessing of a model, with the keys of ``preprocessor_config.json``."""
    transforms = weights_of(name).transforms()
    return {
        "size": transforms.crop_size[0],
        "image_mean": transforms.mean,
        "image_std": transforms.std,
        "channels": 3,
    }


def build_from_description(description: dict[str, Any], classes: int) -> nn.Module:
    """Builds a network from :meth:`TorchvisionImages.describe`, with initial weights."""
    name, size = description["name"], description["size"]
    arguments = {"image_size": size} if size and name not in _ONLY_224 else {}
    return TorchvisionImages(name, _make_model(name, **arguments), classes)


def _make_model(name: str, **arguments: Any) -> nn.Module:
    if name in _EXTRA_HEADS:
        arguments["aux_logits"] = False
        if "weights" not in arguments:
            arguments["init_weights"] = True
    model: nn.Module = _models().get_model(name, **arguments)
    return model


def _models() -> Any:
    purpose = f"--model {PREFIX}NAME is loaded"
    return library(
        "torchvision", purpose, "pip install torchvision, of the release for this torch"
    ).models
