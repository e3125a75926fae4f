"""How many nodes a job is to have: a number, or a range in which it may shrink and grow."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANGE = re.compile(r"(?P<least>\d{1,9})(?P<colon>:(?P<most>\d{1,9})?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class NodeRange:
    """``MIN:MAX``, as torchrun writes it, or ``MIN:``. Hosts beyond the most are spares.

    Attributes:
        least: Nodes without which the job does not run.
        most: Nodes that get ranks at most; ``None`` for all hosts.
    """

    least: int
    most: int | None = None

    def __str__(self) -> str:
        return f"{self.least}:{'' if self.most is None else self.most}"


NodeCount = int | NodeRange


def nodes_of(text: str) -> NodeCount:
    """``2``, ``1:3`` or ``2:``. ValueError, with what is wrong, for anything else."""
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is neither a number nor MIN:MAX")
    least = int(found["least"])
    if not found["colon"]:
        return least
    most = None if found["most"] is None else int(found["most"])
    if least < 1:
        raise ValueError(f"{text}: at least 1 node")
    if most is not None and most < least:
        raise ValueError(f"{text}: the most is less than the least")
    return NodeRange(least, most)


def bounds(nodes: NodeCount | None, hosts: int) -> tuple[int, int]:
    """Fewest and most nodes with ranks, of so many hosts. ``None`` means all of them."""
    if isinstance(nodes, NodeRange):
        return nodes.least, hosts if nodes.most is None else min(nodes.most, hosts)
    return (hosts, hosts) if nodes is None else (nodes, nodes)
