"""Writes a software bill of materials of an installed Paceline, as CycloneDX 1.6 JSON.

    python tools/sbom.py [EXTRA ...] > paceline.cdx.json

It lists what this environment holds for the wheel and these extras, with licences and dependencies.
After ``make env``, versions are those of constraints.txt, and of torch in the Makefile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "paceline"


def requirements(package: Distribution, extras: Iterable[str]) -> list[Requirement]:
    """Returns what a package needs in this environment, with some of its extras."""
    environments = [{"extra": extra} for extra in ("", *extras)]
    found = map(Requirement, package.requires or ())
    return [
        needed
        for needed in found
        if needed.marker is None or any(map(needed.marker.evaluate, environments))
    ]


def resolve(extras: Iterable[str]) -> tuple[dict[str, Distribution], dict[str, set[str]]]:
    """Returns the installed packages by name, and the names of those that each one needs.

    What is not installed is left out: platforms differ in what they need.
    """
    packages: dict[str, Distribution] = {}
    needs: dict[str, set[str]] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    waiting = [(ROOT, frozenset(extras))]
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in visited:
            continue
        visited.add((name, wanted))
        try:
            packages[name] = distribution(name)
        except PackageNotFoundError:
            continue
        for needed in requirements(packages[name], wanted):
            other = str(canonicalize_name(needed.name))
            needs.setdefault(name, set()).add(other)
            waiting.append((other, frozenset(needed.extras)))
    return packages, {name: needs.get(name, set()) & set(packages) for name in packages}


def reference(name: str, package: Distribution) -> str:
    return f"pkg:pypi/{name}@{quote(package.version)}"


def component(name: str, package: Distribution) -> dict[str, Any]:
    """Returns the description of a package."""
    place = reference(name, package)
    kind = "application" if name == ROOT else "library"
    described = {"type": kind, "bom-ref": place, "name": name, "version": package.version}
    if name != ROOT:
        described["purl"] = place
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return {**described, "licenses": [{"expression": expression}]}
    names = [
        text.rpartition(" :: ")[2]
        for text in metadata.get_all("Classifier", [])
        if text.startswith("License :: ")
    ]
    names = names or metadata.get("License", "").splitlines()[:1]  # older ones have its whole text
    return {**described, "licenses": [{"license": {"name": text}} for text in names]}


def bill(extras: Iterable[str]) -> dict[str, Any]:
    """Returns the bill of materials: the same for the same environment."""
    packages, needs = resolve(extras)
    places = {name: reference(name, package) for name, package in packages.items()}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(ROOT, packages[ROOT])},
        "components": [
            component(name, package) for name, package in sorted(packages.items()) if name != ROOT
        ],
        "dependencies": [
            {"ref": places[name], "dependsOn": sorted(places[other] for other in others)}
            for name, others in sorted(needs.items())
        ],
    }


if __name__ == "__main__":
    json.dump(bill(sys.argv[1:]), sys.stdout, indent=1)
    print()
