"""What ``--balance`` does not go with."""

from __future__ import annotations

from paceline.spec import communication as ways
from paceline.spec.errors import SettingError


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
            remedy="weights of hosts, such as --balance n1=3,n2=1, or leave --shard out",
        )
    if balance != "even" and ways.asked(communication).name == "local":
        raise SettingError(
            f"--balance {balance} does not go with --communication {communication}",
            found="ranks that step alone need samples of their own, as many as the others",
            remedy="--balance even, or another way to communicate",
        )
