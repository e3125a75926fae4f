"""The rules: each is a page that people read, and that ``paceline explain`` works by.

A new rule is one file, ``NAME.md``: what to look for stands above the page
(:class:`~paceline.explain.rule.FrontMatter`). One that has to compute says ``computed: true``, and
has ``match(evidence)`` in ``NAME.py`` beside it. Nothing is read before somebody asks for a rule.
"""

from __future__ import annotations

import importlib
from importlib.resources import files

from paceline.explain.rule import Matcher, Rule, from_page


def codes() -> list[str]:
    """The names of all rules."""
    names = (page.name for page in files(__name__).iterdir())
    return sorted(name.removesuffix(".md") for name in names if name.endswith(".md"))


def load(code: str) -> Rule:
    """The rule of that name, read now."""

    def computed() -> Matcher:
        matcher: Matcher = importlib.import_module(f"{__name__}.{code.replace('-', '_')}").match
        return matcher

    return from_page(code, files(__name__).joinpath(f"{code}.md").read_text("utf-8"), computed)


def load_all() -> list[Rule]:
    """Every rule; of two that are equally sure, the one that stands first speaks first."""
    return sorted(map(load, codes()), key=lambda rule: (rule.place, rule.code))
