"""``-H lab``: the hosts of the lab that is up, here on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.spec.errors import HostsError

if TYPE_CHECKING:
    from paceline.lab.layout import Layout

KEYWORD = "lab"


def lab_name(source: str) -> str | None:
    """The lab that a source names, empty for the one that is up; ``None`` for other sources.

    ``lab:4`` is a host called lab with four slots, as in any list.
    """
    keyword, colon, name = source.strip().partition(":")
    if keyword != KEYWORD or (colon and (not name or name.isdigit() or set(name) & set(",@[ "))):
        return None
    return name


def find_lab(name: str, environ: Mapping[str, str]) -> Layout:
    """Where the files of a lab are that is up.

    Args:
        name: Of the lab; empty for the one of ``PACELINE_LAB``, else the only one, else the one
            that ``paceline lab`` means when none is named.
        environ: Environment variables.

    Raises:
        HostsError: There is none, or there are several to choose from.
    """
    from paceline.lab import state

    up = {layout.root.name: layout for layout in state.labs() if state.alive(layout)}
    wanted = name or environ.get("PACELINE_LAB", "")
    if wanted in up:
        return up[wanted]
    listed = ", ".join(up)
    if wanted:
        found = f"up are: {listed}" if up else "no lab is up"
        raise HostsError(f"no lab called {wanted!r} is up", found=found,
                         remedy=f"paceline lab up --name {wanted}")  # fmt: skip
    if not up:
        raise HostsError("no lab is up", remedy="paceline lab up; a host called that: `lab,`")
    if len(up) > 1 and "default" in up:
        return up["default"]
    if len(up) > 1:
        raise HostsError("several labs are up", found=listed,
                         remedy=f"name one: -H lab:{next(iter(up))}")  # fmt: skip
    return next(iter(up.values()))
