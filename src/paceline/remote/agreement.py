"""Checks that all nodes have the same Python and torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.spec.errors import NodeError
from paceline.spec.formatting import shell_text
from paceline.spec.hosts import Host

Facts = Mapping[str, Any]
_MIN_PYTHON = (3, 10)  # of the oldest torch that jobs can use


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
        f"or --python PATH when it is the same on all hosts. To make one there: "
        "paceline setup env --requirements FILE",
    )


def torch_problem(hosts: Sequence[Host], facts: Mapping[str, Facts]) -> NodeError | None:
    """An error if torch is missing on a node or its versions differ."""
    versions = {host.name: (facts[host.name].get("torch") or {}).get("version") for host in hosts}
    lacking = [name for name, version in versions.items() if version is None]
    present = {name: version for name, version in versions.items() if version is not None}
    expected = (most_common(present) or "") if present else ""
    if lacking:
        python = facts[lacking[0]]["python"]["executable"]
        return NodeError(
            f"no torch on {', '.join(lacking)}",
            found=f"{python} on {lacking[0]} has no torch package",
            remedy=_install_remedies(lacking, expected, facts)
            + "\n(or --python PATH for another interpreter; --no-torch for a script without torch)",
        )
    if len(set(versions.values())) < 2:
        return None
    return NodeError(
        "the nodes have different torch versions",
        found="\n".join(f"{name}: torch {version}" for name, version in versions.items()),
        remedy=_install_remedies(outliers(versions), expected, facts),
    )


def _install_remedies(names: Sequence[str], version: str, facts: Mapping[str, Facts]) -> str:
    """Returns how to install that version of torch on each host, one line for equal hosts."""
    hosts: dict[str, list[str]] = {}
    for name in names:
        hosts.setdefault(_install_remedy(version, facts[name]["python"]), []).append(name)
    return "\n".join(f"On {', '.join(hosts[remedy])}: {remedy}" for remedy in hosts)


def _install_remedy(version: str, python: Facts) -> str:
    """Returns the command that installs torch, or why this Python cannot have it.

    Without the index of its build, pip takes ``2.13.0+cpu`` for ``2.13.0`` and installs nothing.
    """
    if tuple(int(number) for number in python["version"].split(".")[:2]) < _MIN_PYTHON:
        return (
            f"Python {python['version']} is too old for torch {version or '2.10'}: install Python "
            "3.10 or newer with torch, and name it with --python"
        )
    release, _, build = version.partition("+")
    has_index = re.fullmatch(r"cpu|xpu|cu\d+|rocm[\d.]+", build) is not None
    package = f"torch=={version if has_index else release}" if version else "torch"
    index = f" --index-url https://download.pytorch.org/whl/{build}" if has_index else ""
    executable = shell_text([python["executable"]])
    if not python.get("externally_managed"):
        return f"{executable} -m pip install {package}{index}"
    return (
        f"{executable} -m venv ~/venv && ~/venv/bin/python -m pip install {package}{index}\n"
        "(pip may not change this system's own Python. Name the full path of ~/venv/bin/python "
        "with --python, or as python under [hosts.NAME] in paceline.toml)"
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
