"""The software bill of materials: complete, exact, and the same each time."""

from __future__ import annotations

import re
import runpy
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SBOM = runpy.run_path(str(REPOSITORY / "tools" / "sbom.py"))


def test_the_launcher_needs_few_packages() -> None:
    made = SBOM["bill"]([])
    assert made["metadata"]["component"]["version"] == version("paceline")
    names = {component["name"] for component in made["components"]}
    assert {"click", "rich", "psutil"} <= names
    assert "torch" not in names


def test_extras_bring_what_they_need_at_the_versions_that_make_installs() -> None:
    made = SBOM["bill"](["recipes", "language"])
    assert made == SBOM["bill"](["recipes", "language"])
    found = {component["name"]: component for component in made["components"]}
    assert {"torch", "numpy", "peft", "transformers", "sympy"} <= set(found)
    text = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", text, re.MULTILINE))
    for name in ("torch", "numpy", "safetensors"):
        assert found[name]["purl"].startswith(f"pkg:pypi/{name}@{pins[name]}")
    assert found["numpy"]["licenses"]


def test_all_references_lead_to_a_component() -> None:
    made = SBOM["bill"](["recipes"])
    places = [made["metadata"]["component"], *made["components"]]
    references = {component["bom-ref"] for component in places}
    assert len(references) == len(places)
    for entry in made["dependencies"]:
        assert {entry["ref"], *entry["dependsOn"]} <= references
