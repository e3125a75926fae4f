"""The rules of ``paceline explain``: each is a page that is also documentation.

A new rule is one file, ``NAME.md``, with front matter
(:class:`~paceline.explain.rule.FrontMatter`) above the page. A rule that needs code sets
``computed: true`` and has ``match(evidence)`` in ``NAME.py``. Rules are read when they are needed.
"""

from __future__ import annotations

import importlib
from importlib.resources import files

from paceline.explain.rule import Matcher, Rule, parse_page


def codes() -> list[str]:
    """The names of all rules."""
    names = (page.name for page in files(__name__).iterdir())
    return sorted(name.removesuffix(".md") for name in names if name.endswith(".md"))


def load(code: str) -> Rule:
    """Reads one rule."""

    def computed() -> Matcher:
        matcher: Matcher = importlib.import_module(f"{__name__}.{code.replace('-', '_')}").match
        return matcher

    return parse_page(code, files(__name__).joinpath(f"{code}.md").read_text("utf-8"), computed)


def load_all() -> list[Rule]:
    """Reads all rules, ordered by ``place``, then by name."""
    return sorted(map(load, codes()), key=lambda rule: (rule.place, rule.code))
