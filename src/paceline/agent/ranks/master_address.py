"""In whose store a rank meets the others: the agent's, unless the script names a master itself.

Torch asks one variable, ``TORCHELASTIC_USE_AGENT_STORE``, for every address. With it set, a script
that opens ``tcp://127.0.0.1:23456`` or sets ``MASTER_ADDR`` by itself waits for ever for a store
that nobody holds. So the variable holds only for the planned address.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from typing import Any, Iterator

VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
_OWN_MASTER = re.compile(rb"tcp://|MASTER_(ADDR|PORT)[\"']\s*\]\s*=|setdefault\(\s*[\"']MASTER_")
_SPAWNS = re.compile(rb"\bspawn\(|\bProcess\(|\bstart_processes\(")


def spawns_and_names_master(source: bytes) -> bool:
    """Whether processes of a script may meet at an address of their own or at the planned one.

    Nobody can look into them, as into the ranks, to see which it is. Rank 0 has to open the store
    then, wherever it is.
    """
    return names_master(source) and _SPAWNS.search(source) is not None


def names_master(source: bytes) -> bool:
    """Whether a script's text opens an address of its own or sets the master's variables."""
    return _OWN_MASTER.search(source) is not None


def follow_plan(source: bytes) -> None:
    """Lets this process, and those it starts, meet where the script means them to.

    Args:
        source: The main script's text; empty when it is not known. Processes that the script
            starts (``mp.spawn``) inherit the variable only if the text names no master.
    """
    if os.environ.get(VARIABLE) != "True":
        return
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    original = getattr(rendezvous, "_create_c10d_store", None)
    if original is None:  # another torch: torchrun's contract as it is
        return
    planned = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    @functools.wraps(original)
    def create(
        hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        is_planned = (hostname, int(port)) == planned
        if not is_planned:
            _require_reachable(hostname, port, world_size)
        with _agent_store(is_planned):
            return original(hostname, port, rank, world_size, *args, **kwargs)

    rendezvous._create_c10d_store = create
    if names_master(source):
        del os.environ[VARIABLE]


def _require_reachable(hostname: str, port: int, world_size: int) -> None:
    """Raises RuntimeError if ranks on several hosts would wait for each other at loopback."""
    num_hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    is_loopback = hostname in ("localhost", "::1") or str(hostname).startswith("127.")
    if is_loopback and num_hosts > 1 and world_size == int(os.environ.get("WORLD_SIZE", "0")):
        raise RuntimeError(
            "the script lets its ranks meet at %s port %s, which leads each of the %d hosts to"
            " itself. Leave out the lines that set MASTER_ADDR and MASTER_PORT, or the address"
            " in init_method: every rank gets MASTER_ADDR and MASTER_PORT from its launcher"
            % (hostname, port, num_hosts)
        )


@contextlib.contextmanager
def _agent_store(is_agent_store: bool) -> Iterator[None]:
    former = os.environ.pop(VARIABLE, None)
    if is_agent_store:
        os.environ[VARIABLE] = "True"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if former is not None:
            os.environ[VARIABLE] = former
