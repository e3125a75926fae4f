"""Replacement of a classifier's head in transfer learning."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from paceline.spec.errors import SettingError


def backbone_names(network: nn.Module, backbone: Sequence[nn.Module]) -> set[str]:
    """Returns the keys of the backbone's tensors in the network's state dict."""
    tensor_ids = {
        id(parameter) for part in backbone for parameter in part.state_dict(keep_vars=True).values()
    }
    state = network.state_dict(keep_vars=True)
    return {name for name, tensor in state.items() if id(tensor) in tensor_ids}


def reset_head(network: nn.Module, backbone: Sequence[nn.Module]) -> None:
    """Initialises all modules outside the backbone again."""
    backbone_ids = {id(module) for part in backbone for module in part.modules()}
    for module in network.modules():
        if id(module) not in backbone_ids and callable(
            reset := getattr(module, "reset_parameters", None)
        ):
            reset()


def add_layers(network: nn.Module, backbone: Sequence[nn.Module], widths: Sequence[int]) -> None:
    """Inserts linear layers, each with a ReLU, before a new output layer.

    Args:
        network: Network, changed in place.
        backbone: Its modules without the head.
        widths: Outputs of each layer; does nothing if empty.

    Raises:
        SettingError: The network does not end with a linear layer.
    """
    if not widths:
        return
    backbone_ids = {id(module) for part in backbone for module in part.modules()}
    linear_layers = [
        (name, module)
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in backbone_ids
    ]
    if not linear_layers:
        raise SettingError(
            f"--add-layers {' '.join(map(str, widths))}: this model's head has no linear layer",
            remedy="another --model, or leave it out",
        )
    name, output_layer = linear_layers[-1]
    sizes = [output_layer.in_features, *widths]
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    head = nn.Sequential(*layers, nn.Linear(sizes[-1], output_layer.out_features))
    owner, _, attribute = name.rpartition(".")
    setattr(network.get_submodule(owner), attribute, head)
