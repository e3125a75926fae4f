"""What all nodes must have alike before they can train together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.spec.errors import NodeError
from paceline.spec.hosts import Host

Facts = Mapping[str, Any]


def interpreter_problem(host: Host, wanted: str, chosen: str, facts: Facts) -> NodeError | None:
    """The wanted interpreter is not there, so the agent runs on another.

    Args:
        host: Where.
        wanted: Path that the job was to use.
        chosen: The interpreter that the agent really found.
        facts: Of that host, for what it has instead.
    """
    if chosen == wanted:
        return None
    torch = facts.get("torch")
    having = f"with torch {torch['version']}" if torch else "without torch"
    python = facts["python"]
    return NodeError(
        f"{host.name} has no Python at {wanted}",
        found=f"{python['executable']} (Python {python['version']}, {having})",
        remedy=f'Set python = "/path/to/python" under [hosts.{host.name}] in paceline.toml, '
        f"or --python PATH when it is the same on all hosts",
    )


def torch_problem(hosts: Sequence[Host], facts: Mapping[str, Facts]) -> NodeError | None:
    """Torch is missing on a node, or is not the same version on all."""
    versions = {host.name: (facts[host.name].get("torch") or {}).get("version") for host in hosts}
    without = [name for name, version in versions.items() if version is None]
    if without:
        python = facts[without[0]]["python"]["executable"]
        return NodeError(
            f"no torch on {', '.join(without)}",
            found=f"{python} on {without[0]} has no torch package",
            remedy=f"On {without[0]}: {python} -m pip install torch"
            "\n(or --python PATH for another interpreter; --no-torch for a script without torch)",
        )
    if len(set(versions.values())) > 1:
        return NodeError(
            "the nodes have different torch versions",
            found="\n".join(f"{name}: torch {version}" for name, version in versions.items()),
            remedy="\n".join(
                f"On {name}: {facts[name]['python']['executable']} -m pip install "
                f"torch=={_plain(usual(versions))}"
                for name in odd_ones(versions)
            ),
        )
    return None


LOADING = (
    "PYTHONPATH", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONWARNINGS",
    "PYTHONOPTIMIZE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT",
)  # fmt: skip
"""Variables that decide which modules and libraries Python loads, or what it makes of them."""


def loading_variables(facts: Facts) -> str:
    """``NAME=value`` of each such variable that the login on a host sets; empty for none."""
    login = facts.get("environment") or {}
    return " ".join(f"{name}={login[name]}" for name in LOADING if name in login)


def usual(values: Mapping[str, str | None]) -> str | None:
    """What most have; of equally many, what the first has."""
    return Counter(values.values()).most_common(1)[0][0]


def odd_ones(values: Mapping[str, str | None]) -> list[str]:
    """Those that do not have what most have."""
    most = usual(values)
    return [name for name, value in values.items() if value != most]


def _plain(version: str | None) -> str:
    return (version or "").split("+")[0]


def differences(what: str, values: Mapping[str, str]) -> list[str]:
    """One sentence when the nodes' values are not all the same; none when they are."""
    if len(set(values.values())) < 2:
        return []
    listed = ", ".join(f"{name} {value}" for name, value in values.items())
    return [f"{what} differs between the nodes: {listed}"]
