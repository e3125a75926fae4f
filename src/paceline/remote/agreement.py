"""Checks that all nodes have the same Python and torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.spec.errors import NodeError
from paceline.spec.formatting import shell_text
from paceline.spec.hosts import Host

Facts = Mapping[str, Any]


def interpreter_problem(host: Host, requested: str, actual: str, facts: Facts) -> NodeError | None:
    """An error if the agent had to use another interpreter than requested, both by their paths."""
    if actual == requested:
        return None
    torch = facts.get("torch")
    with_torch = f"with torch {torch['version']}" if torch else "without torch"
    python = facts["python"]
    return NodeError(
        f"{host.name} has no Python at {requested}",
        found=f"{python['executable']} (Python {python['version']}, {with_torch})",
        remedy=f'Set python = "/path/to/python" under [hosts.{host.name}] in paceline.toml, '
        f"or --python PATH when it is the same on all hosts",
    )


def torch_problem(hosts: Sequence[Host], facts: Mapping[str, Facts]) -> NodeError | None:
    """An error if torch is missing on a node or its versions differ."""
    versions = {host.name: (facts[host.name].get("torch") or {}).get("version") for host in hosts}
    lacking = [name for name, version in versions.items() if version is None]
    if lacking:
        python = facts[lacking[0]]["python"]["executable"]
        return NodeError(
            f"no torch on {', '.join(lacking)}",
            found=f"{python} on {lacking[0]} has no torch package",
            remedy=f"On {lacking[0]}: {shell_text([python])} -m pip install torch"
            "\n(or --python PATH for another interpreter; --no-torch for a script without torch)",
        )
    if len(set(versions.values())) < 2:
        return None
    expected = (most_common(versions) or "").split("+")[0]
    return NodeError(
        "the nodes have different torch versions",
        found="\n".join(f"{name}: torch {version}" for name, version in versions.items()),
        remedy="\n".join(
            f"On {name}: {shell_text([facts[name]['python']['executable']])} -m pip install"
            f" torch=={expected}"
            for name in outliers(versions)
        ),
    )


LOADER_VARIABLES = (
    "PYTHONPATH", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONWARNINGS",
    "PYTHONOPTIMIZE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT",
)  # fmt: skip
"""Variables that change which modules and libraries Python loads, or how."""


def loader_variables(facts: Facts) -> str:
    """``NAME=value`` of each such variable that a host's login sets; may be empty."""
    login = facts.get("environment") or {}
    return " ".join(f"{name}={login[name]}" for name in LOADER_VARIABLES if name in login)


def most_common(values: Mapping[str, str | None]) -> str | None:
    """The most common value; of several, the first."""
    return Counter(values.values()).most_common(1)[0][0]


def outliers(values: Mapping[str, str | None]) -> list[str]:
    """The names whose value differs from the most common one."""
    expected = most_common(values)
    return [name for name, value in values.items() if value != expected]


def differences(subject: str, values: Mapping[str, str]) -> list[str]:
    """A sentence if the nodes' values differ; else none."""
    if len(set(values.values())) < 2:
        return []
    listed = ", ".join(f"{name} {value}" for name, value in values.items())
    return [f"{subject} differs between the nodes: {listed}"]
