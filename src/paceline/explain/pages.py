"""The page of every rule, made from its description: ``python -m paceline.explain.pages``."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.explain.rule import SECTIONS, Rule
from paceline.explain.rules import load_all

_KIND = {False: "a cause", True: "a symptom: spoken of only when no cause is known"}


def page(rule: Rule) -> str:
    """The page of a rule, as Markdown."""
    parts = [f"# {rule.title}", f"`{rule.code}` ({_KIND[rule.symptom]})"]
    parts += [f"**{name}.** {_sentence(rule.sections[name])}" for name in SECTIONS]
    return "\n\n".join(parts) + "\n"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text.rstrip(';')}."


def index(rules: list[Rule]) -> str:
    """The list of all pages."""
    lines = [f"- [{rule.title}]({rule.code}.md): `{rule.code}`" for rule in rules]
    head = "# Failures that paceline knows\n\n`paceline explain` looks for these; see "
    return head + "[explain](../explain.md).\n\n" + "\n".join(lines) + "\n"


def write(folder: Path) -> None:
    """Writes all pages and their list, and removes those of rules that are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    rules = load_all()
    for old in folder.glob("*.md"):
        old.unlink()
    for rule in rules:
        (folder / f"{rule.code}.md").write_text(page(rule), encoding="utf-8")
    (folder / "README.md").write_text(index(rules), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/rules"))
