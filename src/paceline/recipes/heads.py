"""The head of a classifier, which transfer learning makes anew; its backbone is what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from paceline.spec.errors import SettingError


def names_within(network: nn.Module, backbone: Sequence[nn.Module]) -> set[str]:
    """Names, in the network's state, of the tensors that belong to its backbone."""
    inside = {id(one) for part in backbone for one in part.state_dict(keep_vars=True).values()}
    state = network.state_dict(keep_vars=True)
    return {name for name, tensor in state.items() if id(tensor) in inside}


def renew(network: nn.Module, backbone: Sequence[nn.Module]) -> None:
    """New initial weights for everything but the backbone."""
    kept = {id(module) for part in backbone for module in part.modules()}
    for module in network.modules():
        if id(module) not in kept and callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def add_layers(network: nn.Module, backbone: Sequence[nn.Module], widths: Sequence[int]) -> None:
    """Puts linear layers, each with a ReLU, before the output layer, which is made anew.

    Args:
        network: Changed in place.
        backbone: Its parts without the head.
        widths: Outputs of each layer; none changes nothing.

    Raises:
        SettingError: The network does not end with a linear layer.
    """
    if not widths:
        return
    kept = {id(module) for part in backbone for module in part.modules()}
    ends = [
        (name, module)
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in kept
    ]
    if not ends:
        raise SettingError(
            f"--add-layers {' '.join(map(str, widths))}: this model's head has no linear layer",
            remedy="another --model, or leave it out",
        )
    name, last = ends[-1]
    sizes = [last.in_features, *widths]
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    head = nn.Sequential(*layers, nn.Linear(sizes[-1], last.out_features))
    owner, _, place = name.rpartition(".")
    setattr(network.get_submodule(owner), place, head)
