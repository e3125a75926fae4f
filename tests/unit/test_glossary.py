"""One word for one thing: words that were retired do not come back."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from each_case import each_case

REPOSITORY = Path(__file__).parents[2]
# what is retired -> what is said instead
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
    r"hears nothing of (the launcher|us)": "heartbeat timeout",
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
}  # nouns that end so


def _texts() -> list[tuple[str, str]]:
    listed = subprocess.run(["git", "ls-files", "src", "docs", "README.md", "CONTRIBUTING.md"],
                            cwd=REPOSITORY, check=True, capture_output=True, text=True)  # fmt: skip
    found = []
    for name in listed.stdout.split():
        path = REPOSITORY / name
        if path.is_file() and path.suffix in (".py", ".md") and path.name != "glossary.md":
            found.append((name, path.read_text(encoding="utf-8")))
    return found


@each_case("retired", RETIRED)
def test_a_retired_word_stays_away(retired: str) -> None:
    word = re.compile(rf"(?<![a-z])(?:{retired})", re.IGNORECASE)
    found = [
        f"{name}:{number}: {line.strip()[:90]}"
        for name, text in _texts()
        for number, line in enumerate(text.splitlines(), 1)
        if word.search(line)
    ]
    assert not found, f"{RETIRED[retired]}, please:\n" + "\n".join(found)


def test_modules_are_called_by_nouns() -> None:
    """What a file holds, not what somebody does."""
    modules = [Path(name) for name, _ in _texts() if name.startswith("src/")]
    gerunds = [str(path) for path in modules if GERUNDS.match(path.stem)]
    assert [path for path in gerunds if Path(path).stem not in NOUNS] == []
