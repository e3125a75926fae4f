"""Tests that the software bill of materials is complete, exact and reproducible."""

from __future__ import annotations

import re
import runpy
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SBOM = runpy.run_path(str(REPOSITORY / "tools" / "sbom.py"))


def test_base_install_needs_no_torch() -> None:
    bill = SBOM["bill"]([])
    assert bill["metadata"]["component"]["version"] == version("paceline")
    names = {component["name"] for component in bill["components"]}
    assert {"click", "rich", "psutil"} <= names
    assert "torch" not in names


def test_extras_list_dependencies_at_pinned_versions() -> None:
    bill = SBOM["bill"](["recipes", "language"])
    assert bill == SBOM["bill"](["recipes", "language"])
    by_name = {component["name"]: component for component in bill["components"]}
    assert {"torch", "numpy", "peft", "transformers", "sympy"} <= set(by_name)
    text = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", text, re.MULTILINE))
    for name in ("torch", "numpy", "safetensors"):
        assert by_name[name]["purl"].startswith(f"pkg:pypi/{name}@{pins[name]}")
    assert by_name["numpy"]["licenses"]


def test_all_references_resolve() -> None:
    bill = SBOM["bill"](["recipes"])
    components = [bill["metadata"]["component"], *bill["components"]]
    references = {component["bom-ref"] for component in components}
    assert len(references) == len(components)
    for entry in bill["dependencies"]:
        assert {entry["ref"], *entry["dependsOn"]} <= references
