"""What a check is: an identifier, a probe, a judge. The remedies stand in what the judge says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paceline.checks.scene import Scene
from paceline.spec.finding import Finding

if TYPE_CHECKING:
    from paceline.checks.probing import Probing

Level = Literal["facts", "quick", "full"]
LEVELS: tuple[Level, ...] = ("facts", "quick", "full")


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        id: Its name in findings.
        title: What it looks at, in a few words.
        level: ``facts`` needs nothing that the login did not bring; ``quick`` asks the nodes,
            in well under a second when all is well; ``full`` takes its time.
        judge: What the scene says. Pure. Called only when the probe (if any) has succeeded.
        probe: Asks the nodes; what it returns stands in the scene under ``id`` and must be JSON.
        several: Makes sense only where two hosts or more let us in.
        torch: Makes sense only for jobs that use torch.
    """

    id: str
    title: str
    level: Level
    judge: Callable[[Scene], list[Finding]]
    probe: Callable[[Probing], Awaitable[Any]] | None = None
    several: bool = False
    torch: bool = False


def passed(check: str, hosts: tuple[str, ...] | list[str], message: str) -> Finding:
    return Finding(check, "pass", tuple(hosts), message)


def warned(check: str, hosts: tuple[str, ...] | list[str], message: str, remedy: str) -> Finding:
    return Finding(check, "warn", tuple(hosts), message, remedy)


def failed(check: str, hosts: tuple[str, ...] | list[str], message: str, remedy: str) -> Finding:
    return Finding(check, "fail", tuple(hosts), message, remedy)


def unknown(check: str, hosts: tuple[str, ...] | list[str], message: str,
            remedy: str = "") -> Finding:  # fmt: skip
    return Finding(check, "unknown", tuple(hosts), message, remedy)


def size(count: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def rate(bits: float) -> str:
    """Bits a second for people: ``940 Mbit/s``."""
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def listed(names: list[str] | tuple[str, ...], limit: int = 6) -> str:
    """``n1, n2 and n3``; long lists are cut."""
    shown = list(names[:limit])
    if len(names) > limit:
        return f"{', '.join(shown)} and {len(names) - limit} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))
