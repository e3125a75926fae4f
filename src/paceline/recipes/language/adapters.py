"""What of a language model is trained: adapters, or everything. The rest is not sent or saved."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.program import library
from paceline.train.device import Precision

Method = Literal["lora", "qlora", "dora", "full"]


def add_adapters(model: Any, method: Method, rank: int, alpha: float) -> Any:
    """Returns the model with new adapters of all linear layers, which alone are trained.

    Unchanged for ``full``. Adapters start without an effect, from torch's generator.
    """
    if method == "full":
        return model
    peft = library("peft", f"--method {method} is trained")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear",
        use_dora=method == "dora",
        task_type="CAUSAL_LM",
    )
    with without_future_warnings():
        return peft.get_peft_model(model, config)


def checkpoint_gradients(model: Any, method: Method) -> None:
    """Lets the model keep fewer activations and compute them again in the backward pass."""
    with without_future_warnings():
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if method != "full":
        model.enable_input_require_grads()


@contextmanager
def without_future_warnings() -> Iterator[None]:
    """Context that hides warnings about names that transformers 5 still has, and 6 will not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def place(model: Any, device: torch.device, precision: Precision, method: Method) -> Any:
    """Moves a model to a device and to its precision.

    Frozen weights are stored in bfloat16 if an accelerator computes in it, which takes half the
    memory and no more rounding than the computation itself. A base of QLoRA stays as it is.
    """
    is_half = precision.compute is torch.bfloat16 and device.type != "cpu" and method != "full"
    for parameter in model.parameters():
        if method == "qlora" and not parameter.requires_grad:
            continue
        dtype = torch.promote_types(parameter.dtype, precision.parameters)
        frozen_dtype = torch.bfloat16 if is_half and parameter.is_floating_point() else dtype
        parameter.data = parameter.data.to(
            device, dtype if parameter.requires_grad else frozen_dtype
        )
    return model.to(device)


class TrainedPart(nn.Module):
    """Holds the parameters of a model that are trained, under their names in it, and calls it.

    The other parameters belong to no module that a session sees: they are not sent to other ranks,
    not compared at every check, and not in checkpoints.

    Attributes:
        whole_model: The model with all its parameters.
    """

    whole_model: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        object.__setattr__(self, "whole_model", model)  # no submodule
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                _register(self, name, parameter)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the scores of the next token, shape ``[rows, length, vocabulary]``."""
        logits: Tensor = self.whole_model(
            input_ids=tokens, position_ids=positions, use_cache=False
        ).logits
        return logits

    def train(self, mode: bool = True) -> TrainedPart:
        super().train(mode)
        self.whole_model.train(mode)
        return self

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Writes the adapter in the format of peft, or the whole model in that of transformers.

        Args:
            state: Values of what is trained, by name.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # peft would look for the base's configuration, also on the hub, to see if that has changed
        is_adapted = hasattr(self.whole_model, "peft_config")
        options: dict[str, Any] = {"save_embedding_layers": False} if is_adapted else {}
        self.whole_model.save_pretrained(str(folder), state_dict=dict(state), **options)


def _register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Adds a parameter to a module under a name with dots, with modules in between."""
    first, _, following = name.partition(".")
    if not following:
        module.register_parameter(first, parameter)
        return
    if first not in module._modules:
        module.add_module(first, nn.Module())
    _register(module._modules[first], following, parameter)  # type: ignore[arg-type]
