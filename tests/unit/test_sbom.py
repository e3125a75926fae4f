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


def test_extras_list_dependencies() -> None:
    bill = SBOM["bill"](["recipes", "language"])
    assert bill == SBOM["bill"](["recipes", "language"])
    by_name = {component["name"]: component for component in bill["components"]}
    assert {"torch", "numpy", "peft", "transformers", "sympy"} <= set(by_name)
    assert by_name["numpy"]["licenses"]


def test_pins_have_hashes() -> None:
    text = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    entries = re.findall(
        r"^([\w-]+)==([\w.+-]+)(.*(?:\n    --hash=sha256:\w{64}.*)+)", text, re.MULTILINE
    )
    pins = {f"pkg:pypi/{name}@{version}" for name, version, _ in entries}
    assert len(entries) == len(re.findall(r"^[\w-]+==", text, re.MULTILINE))
    extras = ["recipes", "parquet", "language", "export", "trackers", "dev"]
    installed = {
        component["purl"]: component["name"] for component in SBOM["bill"](extras)["components"]
    }
    assert {name for purl, name in installed.items() if purl not in pins} == {"torch"}


def test_all_references_resolve() -> None:
    bill = SBOM["bill"](["recipes"])
    components = [bill["metadata"]["component"], *bill["components"]]
    references = {component["bom-ref"] for component in components}
    assert len(references) == len(components)
    for entry in bill["dependencies"]:
        assert {entry["ref"], *entry["dependsOn"]} <= references
