"""Parses ``--balance`` and ``--micro-batch`` values for hosts and refuses what does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from paceline.spec.errors import SettingError
from paceline.spec.training import communication as methods

MAX_WEIGHT = 1e100
"""Largest weight of a host: sums of larger ones may overflow."""


def validate(
    balance: str, *, drop_slow: bool = False, sharded: bool = False, communication: str = "exact"
) -> None:
    """Raises SettingError for shares of the global batch that other options rule out.

    Args:
        balance: ``auto``, ``even``, or weights of hosts as typed.
        drop_slow: Ranks that only make steps longer get no samples.
        sharded: The model's parameters are spread over the ranks.
        communication: How gradients are averaged.
    """
    if drop_slow and balance != "auto":
        raise SettingError(
            "--drop-slow needs --balance auto",
            found="only with --balance auto the ranks' speeds decide who computes what",
            remedy="--balance auto --drop-slow, or leave it out",
        )
    if balance == "auto" and sharded:
        raise SettingError(
            "--balance auto cannot be combined with --shard",
            found="in a sharded model ranks wait for each other in every layer, so their speeds"
            " cannot be told apart",
            remedy="a weight for each of your hosts, as in --balance n1=3,n2=1, or leave --shard"
            " out",
        )
    if balance != "even" and methods.parse_method(communication).name == "local":
        raise SettingError(
            f"--balance {balance} cannot be combined with --communication {communication}",
            found="with local steps every rank needs the same number of samples",
            remedy="--balance even, or another --communication",
        )


def parse_weights(balance: str) -> Literal["auto", "even"] | dict[str, float]:
    """Returns ``auto``, ``even``, or weights by host name; SettingError for anything else."""
    if balance == "auto":
        return "auto"
    if balance == "even":
        return "even"
    weights: dict[str, float] = {}
    for item in balance.split(","):
        name, _, number = (part.strip() for part in item.partition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not 0 < weight <= MAX_WEIGHT or name in weights:
            repeated = f"{name} has a weight already" if name in weights else ""
            raise SettingError(
                f"--balance {balance} is not valid",
                found=repeated or f"{item!r} is not a host with a weight greater than 0",
                remedy="auto, even, or a weight for each host: --balance n1=3,n2=1",
            )
        weights[name] = weight
    return weights


def format_weights(weights: Mapping[str, float]) -> str:
    """``n1=3,n2=1``: the inverse of :func:`parse_weights`."""
    return ",".join(f"{name}={weight:g}" for name, weight in weights.items())


def validate_weights(weights: Mapping[str, float], hosts: Sequence[str]) -> None:
    """Raises SettingError unless each host that the job may run on has a weight greater than 0."""
    names = list(dict.fromkeys(hosts))
    text = format_weights(weights)
    lowercase = {name.lower(): weight for name, weight in weights.items()}
    suggestion = format_weights({name: lowercase.get(name.lower(), 1) for name in names})
    if unknown := [name for name in weights if name not in names]:
        raise SettingError(
            f"--balance {text}: no host of this job is called {', '.join(unknown)}",
            found=f"its hosts are {', '.join(names)}",
            remedy=f"--balance {suggestion}",
        )
    if missing := [name for name in names if name not in weights]:
        raise SettingError(
            f"--balance {text}: there is no weight for {', '.join(missing)}",
            found=f"the hosts of this job are {', '.join(names)}",
            remedy=f"--balance {suggestion}",
        )
    for name, weight in weights.items():
        if not 0 < weight < math.inf:
            raise SettingError(
                f"--balance {text}: the weight of {name} must be greater than 0",
                remedy="leave a host that is to do nothing out of the job",
            )


def validate_limits(limits: Mapping[str, int], hosts: Sequence[str]) -> None:
    """Raises SettingError for a limit of samples that names no host of the job, or is below 1."""
    names = list(dict.fromkeys(hosts))
    text = ",".join(f"{name}={limit}" for name, limit in limits.items())
    if unknown := [name for name in limits if name not in names]:
        raise SettingError(
            f"--micro-batch {text}: no host of this job is called {', '.join(unknown)}",
            found=f"its hosts are {', '.join(names)}",
            remedy=f"--micro-batch {_suggested_limits(limits, names)}",
        )
    if min(limits.values(), default=1) < 1:
        raise SettingError(
            f"--micro-batch {text}: a host computes at least 1 sample at once",
            remedy="name only hosts that are to have a limit",
        )


def _suggested_limits(limits: Mapping[str, int], names: Sequence[str]) -> str:
    """Formats the limits of the hosts that exist, or one for the last host as an example."""
    lowercase = {name.lower(): limit for name, limit in limits.items()}
    matches = {name: lowercase[name.lower()] for name in names if name.lower() in lowercase}
    matches = matches or {names[-1]: next(iter(limits.values()))}
    return ",".join(f"{name}={limit}" for name, limit in matches.items())
