"""What ``--balance`` says, and what it does not go with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from paceline.spec import communication as ways
from paceline.spec.errors import SettingError

MOST_WEIGHT = 1e100
"""Of a host: sums of larger ones may be no numbers any more."""


def refuse(
    balance: str, *, drop_slow: bool = False, sharded: bool = False, communication: str = "exact"
) -> None:
    """For shares of the global batch that cannot be had.

    Args:
        balance: ``auto``, ``even``, or weights of hosts as they are typed.
        drop_slow: A rank that only makes steps longer is to get nothing to do.
        sharded: The model's parameters are spread over the ranks.
        communication: How gradients are averaged.

    Raises:
        SettingError: Says what does not go together.
    """
    if drop_slow and balance != "auto":
        raise SettingError(
            "--drop-slow has nothing to go by",
            found="only with --balance auto the ranks' speeds decide who computes what",
            remedy="--balance auto --drop-slow, or leave it out",
        )
    if balance == "auto" and sharded:
        raise SettingError(
            "--balance auto does not go with --shard",
            found="in a sharded model ranks wait for each other in every layer, so their speeds"
            " cannot be told apart",
            remedy="a weight for each of your hosts, as in --balance n1=3,n2=1, or leave --shard"
            " out",
        )
    if balance != "even" and ways.asked(communication).name == "local":
        raise SettingError(
            f"--balance {balance} does not go with --communication {communication}",
            found="ranks that step alone need samples of their own, as many as the others",
            remedy="--balance even, or another way to communicate",
        )


def weights_of(balance: str) -> Literal["auto", "even"] | dict[str, float]:
    """What ``--balance`` says: ``auto``, ``even``, or weights of hosts.

    Raises:
        SettingError: Anything else, or a weight that is not greater than 0.
    """
    if balance == "auto":
        return "auto"
    if balance == "even":
        return "even"
    weights: dict[str, float] = {}
    for word in balance.split(","):
        name, _, number = (one.strip() for one in word.partition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not 0 < weight <= MOST_WEIGHT or name in weights:
            twice = f"{name} has a weight already" if name in weights else ""
            raise SettingError(
                f"--balance {balance}: cannot be understood",
                found=twice or f"{word!r} is no host with a weight greater than 0",
                remedy="auto, even, or a weight for each host: --balance n1=3,n2=1",
            )
        weights[name] = weight
    return weights


def refuse_weights(weights: Mapping[str, float], hosts: Sequence[str]) -> None:
    """For weights that are not those of the job's hosts.

    Args:
        weights: By the name of the host.
        hosts: All that the job may run on, also those that are not there now.

    Raises:
        SettingError: A host has none or is no host of the job, or a weight is not greater than 0.
    """
    names = list(dict.fromkeys(hosts))
    text = ",".join(f"{name}={weight:g}" for name, weight in weights.items())
    meant = {name.lower(): weight for name, weight in weights.items()}
    right = ",".join(f"{name}={meant.get(name.lower(), 1):g}" for name in names)
    if unknown := [name for name in weights if name not in names]:
        raise SettingError(
            f"--balance {text}: no host of this job is called {', '.join(unknown)}",
            found=f"its hosts are {', '.join(names)}",
            remedy=f"--balance {right}",
        )
    if missing := [name for name in names if name not in weights]:
        raise SettingError(
            f"--balance {text}: there is no weight for {', '.join(missing)}",
            found=f"the hosts of this job are {', '.join(names)}",
            remedy=f"--balance {right}",
        )
    for name, weight in weights.items():
        if not 0 < weight < math.inf:
            raise SettingError(
                f"--balance {text}: the weight of {name} must be greater than 0",
                remedy="leave a host that is to do nothing out of the job",
            )


def refuse_limits(limits: Mapping[str, int], hosts: Sequence[str]) -> None:
    """For numbers of samples computed at once that are not those of the job's hosts.

    Args:
        limits: By the name of the host; a host without one has no limit.
        hosts: All that the job may run on, also those that are not there now.

    Raises:
        SettingError: One is for no host of the job, or below 1.
    """
    names = list(dict.fromkeys(hosts))
    text = ",".join(f"{name}={limit}" for name, limit in limits.items())
    if unknown := [name for name in limits if name not in names]:
        raise SettingError(
            f"--micro-batch {text}: no host of this job is called {', '.join(unknown)}",
            found=f"its hosts are {', '.join(names)}",
            remedy=f"--micro-batch {_meant(limits, names)}",
        )
    if min(limits.values(), default=1) < 1:
        raise SettingError(
            f"--micro-batch {text}: a host computes at least 1 sample at once",
            remedy="name only hosts that are to have a limit",
        )


def _meant(limits: Mapping[str, int], names: Sequence[str]) -> str:
    """The limits of hosts that there are, as they are typed; or one for the last of them."""
    said = {name.lower(): limit for name, limit in limits.items()}
    meant = {name: said[name.lower()] for name in names if name.lower() in said}
    meant = meant or {names[-1]: next(iter(limits.values()))}
    return ",".join(f"{name}={limit}" for name, limit in meant.items())
