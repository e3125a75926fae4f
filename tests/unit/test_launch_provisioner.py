"""Tests when a node gets a copy of this installation's package."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.launch.nodes import provisioner
from paceline.spec.hosts import Host
from paceline.spec.job import Entry, Job
from paceline.transfer.tree import Tree


@pytest.mark.parametrize(
    ("python", "different", "has_path", "expected"),
    [
        (sys.executable, [], False, True),
        (sys.executable, ["paceline/cli.py"], False, False),
        (sys.executable, [], True, False),
        ("/other/python", [], False, False),
    ],
)
def test_node_with_the_same_installation_needs_no_copy(
    python: str, different: list[str], has_path: bool, expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if has_path:
        monkeypatch.setenv("PYTHONPATH", "/src")

    async def request(op: str, **fields: Any) -> dict[str, Any]:
        assert (op, fields["root"]) == ("compare_tree", "/installed")
        return {"exists": True, "missing": [], "different": different}

    node: Any = SimpleNamespace(host=Host("n1"), channel=SimpleNamespace(request=request))
    job = Job("a", Entry("script", "a.py"), "/", python)
    has_package = provisioner._has_package(node, job, Tree(Path("/installed"), []))
    assert asyncio.run(has_package) is expected
