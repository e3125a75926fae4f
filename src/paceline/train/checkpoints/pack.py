"""Nested states as JSON and tensors: what optimizers keep, without pickle."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_TENSOR, _TUPLE, _PAIRS = "$tensor", "$tuple", "$pairs"


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """``value`` as JSON; its tensors go to ``tensors`` under their paths.

    Dictionaries with any keys, lists, tuples, numbers, texts, ``None`` and tensors can be packed.

    Raises:
        TypeError: Something else is in it.
    """
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, dict):
        return _packed_dict(value, tensors, path)
    if isinstance(value, (list, tuple)):
        items = [pack(item, tensors, f"{path}.{n}") for n, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a checkpoint cannot hold {type(value).__name__} (at {path or 'the top'})")


def _packed_dict(value: dict[Any, Any], tensors: dict[str, Tensor], path: str) -> Any:
    packed = {key: pack(item, tensors, f"{path}.{key}") for key, item in value.items()}
    if all(isinstance(key, str) and not key.startswith("$") for key in packed):
        return packed
    return {_PAIRS: [[pack(key, tensors, f"{path}.key"), item] for key, item in packed.items()]}


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What :func:`pack` was given."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(unpack(item, tensors) for item in value[_TUPLE])
    if _PAIRS in value:
        pairs = ((unpack(key, tensors), item) for key, item in value[_PAIRS])
        return {key: unpack(item, tensors) for key, item in pairs}
    return {key: unpack(item, tensors) for key, item in value.items()}
