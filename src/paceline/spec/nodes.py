"""How many nodes a job has: a number, or a range within which it may shrink and grow."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANGE = re.compile(r"(?P<minimum>\d{1,9})(?P<colon>:(?P<maximum>\d{1,9})?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class NodeRange:
    """``MIN:MAX``, as torchrun writes it, or ``MIN:``. Hosts beyond the maximum are spares.

    Attributes:
        minimum: Nodes without which the job does not run.
        maximum: Nodes that get ranks at most; ``None`` for all hosts.
    """

    minimum: int
    maximum: int | None = None

    def __str__(self) -> str:
        return f"{self.minimum}:{'' if self.maximum is None else self.maximum}"


NodeCount = int | NodeRange


def parse_node_count(text: str) -> NodeCount:
    """Parses ``2``, ``1:3`` or ``2:``; raises ValueError, with the reason, for anything else."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is neither a number nor MIN:MAX")
    minimum = int(match["minimum"])
    if not match["colon"]:
        return minimum
    maximum = None if match["maximum"] is None else int(match["maximum"])
    if minimum < 1:
        raise ValueError(f"{text}: at least 1 node")
    if maximum is not None and maximum < minimum:
        raise ValueError(f"{text}: the most is less than the least")
    return NodeRange(minimum, maximum)


def bounds(nodes: NodeCount | None, hosts: int) -> tuple[int, int]:
    """Smallest and largest number of nodes with ranks; ``None`` means all ``hosts``."""
    if isinstance(nodes, NodeRange):
        return nodes.minimum, hosts if nodes.maximum is None else min(nodes.maximum, hosts)
    return (hosts, hosts) if nodes is None else (nodes, nodes)
