"""Tests that retired terms are not used again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from each_case import each_case

REPOSITORY = Path(__file__).parents[2]
# retired term (regular expression) -> its replacement
RETIRED = {
    r"blott?(er|ing|s)?(?![a-z])|blotted": "redactor, redacted",
    r"outlet": "writer",
    r"shelf|shelves": "store",
    r"blam(e|es|ing)(?![a-z])": "attribution, named",
    r"witness(es)?|testimony|testify": "stack dump",
    r"meeting|secret word": "rendezvous, token",
    r"guests?(?![a-z])": "peer",
    r"number format": "precision",
    r"keeps? the state": "save a checkpoint",
    r"shipment|mirroring|staging": "send, fetch",
    r"pulse": "heartbeat",
    r"hears nothing of (the launcher|us)": "lease",
    r"lets us in|struck": "SSH login works, fault active",
}
GERUNDS = re.compile(r"[a-z_]*ing$")
NOUNS = {
    "decoding",
    "finding",
    "preprocessing",
    "provisioning",
    "scaling",
    "string",
    "setting",
    "formatting",
    "multiplexing",
}  # nouns with this ending


def _texts() -> list[tuple[str, str]]:
    listed = subprocess.run(["git", "ls-files", "src", "docs", "README.md", "CONTRIBUTING.md"],
                            cwd=REPOSITORY, check=True, capture_output=True, text=True)  # fmt: skip
    collected = []
    for name in listed.stdout.split():
        path = REPOSITORY / name
        if path.is_file() and path.suffix in (".py", ".md") and path.name != "glossary.md":
            collected.append((name, path.read_text(encoding="utf-8")))
    return collected


@each_case("retired", RETIRED)
def test_retired_terms_are_not_used(retired: str) -> None:
    word = re.compile(rf"(?<![a-z])(?:{retired})", re.IGNORECASE)
    collected = [
        f"{name}:{number}: {line.strip()[:90]}"
        for name, text in _texts()
        for number, line in enumerate(text.splitlines(), 1)
        if word.search(line)
    ]
    assert not collected, f"{RETIRED[retired]}, please:\n" + "\n".join(collected)


def test_module_names_are_nouns() -> None:
    """A module's name says what it contains, not an action."""
    modules = [Path(name) for name, _ in _texts() if name.startswith("src/")]
    gerunds = [str(path) for path in modules if GERUNDS.match(path.stem)]
    assert [path for path in gerunds if Path(path).stem not in NOUNS] == []
