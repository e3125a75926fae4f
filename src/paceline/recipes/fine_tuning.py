"""Starting from weights that exist: what is loaded, what stays frozen, and when it thaws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline.recipes.optimization import Curve
from paceline.spec import rundir
from paceline.spec.errors import DataError, SettingError


def load_backbone(network: nn.Module, source: str) -> tuple[int, list[str]]:
    """Loads every tensor that fits by name and shape; the others keep their initial values.

    Args:
        network: Changed in place.
        source: A run directory, or a ``.safetensors`` or ``.pth``/``.pt`` file.

    Returns:
        The number of tensors loaded, and the names of those that were not.

    Raises:
        DataError: Unreadable, or nothing in it fits.
    """
    state = read_weights(source)
    mine = network.state_dict()
    fits = {n: t for n, t in state.items() if n in mine and mine[n].shape == t.shape}
    if not fits:
        raise DataError(
            f"--weights {source} do not fit the model",
            found=f"of its {len(state)} tensors none has the name and shape of one of the model's",
            remedy="name the --model that they were made with",
        )
    network.load_state_dict(fits, strict=False)
    return len(fits), sorted(set(mine) - set(fits))


def read_weights(source: str) -> dict[str, Tensor]:
    """Tensors by name. Nothing in the file is run."""
    path = Path(source).expanduser()
    path = path / rundir.WEIGHTS if path.is_dir() else path
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise anything
        raise DataError(
            f"--weights {source} cannot be read",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            remedy="a run directory, or a safetensors file",
        ) from None
    state = found.get("state_dict", found) if isinstance(found, dict) else {}
    return {n.removeprefix("module."): t for n, t in state.items() if isinstance(t, Tensor)}


def freeze(modules: Sequence[nn.Module]) -> None:
    """Keeps modules exactly as they are: no gradients, and no running statistics either."""
    for module in modules:
        module.requires_grad_(False)
        hold(module)


def hold(module: nn.Module) -> None:
    """Keeps a module in evaluation mode, also when the whole network goes to training mode."""
    module.eval()
    object.__setattr__(module, "train", lambda mode=True: module)


def let_go(module: nn.Module) -> None:
    """Ends :func:`hold`."""
    vars(module).pop("train", None)


def stages_of(backbone: Sequence[nn.Module]) -> list[nn.Module]:
    """The backbone in stages from input to output; lists of layers are taken apart."""
    children = list(backbone[0].children()) if len(backbone) == 1 else backbone
    parts = [part for child in children for part in _layers(child)]
    return [part for part in parts if next(part.parameters(), None) is not None]


def _layers(child: nn.Module) -> list[nn.Module]:
    """The layers of the outermost list that holds all of the child's parameters."""
    count = len(list(child.parameters()))
    for one in child.modules():
        whole = len(list(one.parameters())) == count
        if isinstance(one, (nn.ModuleList, nn.Sequential)) and len(one) > 1 and whole:
            return list(one)
    return [child]


def thawing(
    optimizer: Optimizer, curve: Curve, stages: Sequence[nn.Module], every: int
) -> LambdaLR:
    """A schedule under which one stage more, from the last, trains after every ``every`` steps.

    Waiting stages have a learning rate of 0, which leaves their parameters bit for bit.

    Args:
        optimizer: With one group; it gets one for each stage.
        curve: Course of the learning rate.
        stages: From input to output.
        every: Global steps between two thaws.
    """
    (group,) = optimizer.param_groups
    waiting = {id(p): n for n, stage in enumerate(reversed(stages), 1) for p in stage.parameters()}
    groups: dict[int, list[Tensor]] = {}
    for parameter in group["params"]:
        groups.setdefault(waiting.get(id(parameter), 0), []).append(parameter)
    order = sorted(groups)
    optimizer.param_groups[:] = [{**group, "params": groups[number]} for number in order]
    # The head's course is the curve itself, which the schedule saves; the others follow it.
    courses = [_from_step(curve, number * every) if number else curve for number in order]
    return LambdaLR(optimizer, courses)


def _from_step(curve: Curve, start: int) -> Callable[[int], float]:
    return lambda step: curve(step) if step >= start else 0.0


class Freezing:
    """What stays as it was loaded, and until when.

    Args:
        backbone: The parts of the network without its head.
        frozen: False changes nothing.
        every: Epochs after which one more stage trains; 0 for never.

    Raises:
        SettingError: The backbone has no stages to unfreeze.
    """

    def __init__(self, backbone: Sequence[nn.Module], frozen: bool, every: int) -> None:
        self._every = every if frozen else 0
        self._stages = stages_of(backbone) if self._every else []
        if self._every and not self._stages:
            raise SettingError(f"--unfreeze-every {every}: this model has no stages to unfreeze")
        if frozen:
            freeze(backbone)
        for stage in self._stages:
            stage.requires_grad_(True)
            hold(stage)

    def schedule(self, optimizer: Optimizer, curve: Curve, epoch_steps: int) -> LambdaLR:
        """The learning rates' schedule; ``epoch_steps`` global steps are an epoch."""
        if not self._every:
            return LambdaLR(optimizer, curve)
        return thawing(optimizer, curve, self._stages, self._every * epoch_steps)

    def begin(self, epoch: int) -> None:
        """Lets the stages go whose time has come; call it at the start of every epoch."""
        for number, stage in enumerate(reversed(self._stages), 1):
            if epoch >= number * self._every:
                let_go(stage)
                stage.train()
