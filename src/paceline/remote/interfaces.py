"""Variables that tell libraries which interface to use: what a node gets, what is refused. Pure.

One value for all hosts is right only where all have the same names, so each node gets its own, and
what the user set for all is held against what each of them has.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host

Facts = Mapping[str, Any]
# gloo and TensorPipe, then what MPI libraries and oneCCL talk by (libfabric over TCP)
EXACT = (
    "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "FI_TCP_IFACE", "FI_SOCKETS_IFACE",
    "I_MPI_HYDRA_IFACE",
)  # fmt: skip
NCCL, UCX, PROVIDER = "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES", "FI_PROVIDER"
NEED_A_CARD = ("verbs", "efa", "mlx")  # providers of libfabric without which nothing can be done
PROVIDERS = (
    *NEED_A_CARD, "tcp", "sockets", "udp", "shm", "sm2", "psm", "psm2", "psm3", "opx", "cxi",
    "usnic", "ofi_rxm", "ofi_rxd", "ofi_mrail", "lnx",
)  # fmt: skip
SHOWN = 8  # lines of an error


def variables(interface: str, facts: Facts) -> dict[str, str]:
    """What a node's ranks are told.

    Args:
        interface: Of the node's address for the job.
        facts: Of the node: its RDMA cards.
    """
    # "=" asks NCCL for exactly this name; alone it would be a prefix
    found = {**dict.fromkeys(EXACT, interface), NCCL: f"={interface}"}
    if devices := ucx_devices(interface, facts):
        found[UCX] = devices
    return found


def ucx_devices(interface: str, facts: Facts) -> str:
    """UCX's devices: the interface, with the port of its own card; empty leaves it to UCX.

    Unlike the other variables this one names cards, too: where there are some that do not belong to
    the interface, naming it alone would forbid UCX the faster way.
    """
    cards = [card for card in facts.get("rdma") or () if card["active"]]
    own = [f"{card['name']}:{card['port']}" for card in cards if interface in card["interfaces"]]
    return "" if cards and not own else ",".join([*own, interface])


def refuse_absent(hosts: Sequence[Host], facts: Mapping[str, Facts],
                  given: Mapping[str, str]) -> None:  # fmt: skip
    """SettingError where a variable of the user's names what some host does not have.

    Libraries would take another without a word (libfabric), or end in the first collective.

    Args:
        hosts, facts: The nodes.
        given: Variables for the ranks there, by name.
    """
    for variable in (*EXACT, NCCL, UCX, PROVIDER):
        value = given.get(variable, "")
        lacking = {
            host.name: missing
            for host in hosts
            if (missing := [*_MISSING.get(variable, _exact)(value, facts[host.name])])
        }
        if lacking:
            raise _absent(variable, value, lacking, facts)


def _links(facts: Facts) -> list[str]:
    return [str(link["name"]) for link in facts["interfaces"] or ()]


def _words(value: str) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()]


def _exact(value: str, facts: Facts) -> Iterator[str]:
    names = _links(facts)
    yield from (word for word in _words(value) if names and word not in names)


def _nccl(value: str, facts: Facts) -> Iterator[str]:
    """A list of prefixes, of names after ``=``; after ``^`` of what is not to be used."""
    names, exact = _links(facts), value.startswith("=")
    words = _words(value.removeprefix("="))
    if not names or not words or value.startswith("^"):
        return
    if not any(name == word if exact else name.startswith(word)
               for name in names for word in words):  # fmt: skip
        yield ",".join(words)


def _ucx(value: str, facts: Facts) -> Iterator[str]:
    """Interfaces and ports of cards, patterns of both, ``all``; after ``^`` what is not used."""
    names = _links(facts)
    cards = [str(card["name"]) for card in facts.get("rdma") or ()]
    if not names or value.startswith("^"):
        return
    for word in _words(value):
        plain = re.fullmatch(r"[\w.-]+(?::\d+)?", word)
        if plain and word != "all" and word.split(":")[0] not in (*names, *cards):
            yield word


def _provider(value: str, facts: Facts) -> Iterator[str]:
    cards = facts.get("rdma")
    if value.startswith("^"):
        return
    for word in re.split(r"[,;]", value.lower()):
        if (word in NEED_A_CARD and cards == []) or (word not in PROVIDERS and _nearest(word)):
            yield word


_MISSING: dict[str, Callable[[str, Facts], Iterator[str]]] = {
    NCCL: _nccl, UCX: _ucx, PROVIDER: _provider,
}  # fmt: skip


def _absent(variable: str, value: str, lacking: Mapping[str, Sequence[str]],
            facts: Mapping[str, Facts]) -> SettingError:  # fmt: skip
    tell = _of_provider if variable == PROVIDER else _of_interface
    lines = [tell(host, lacking[host], facts[host]) for host in list(lacking)[:SHOWN]]
    remedy = "Leave it out, or --env FI_PROVIDER=tcp, which works everywhere"
    if variable != PROVIDER:
        remedy = (
            f"Leave {variable} out: each node gets its own; for another network --iface NAME, or "
            'interface = "NAME" under [hosts.NAME] in paceline.toml'
        )
    return SettingError(
        f"{variable}={value} was given for all ranks", found="\n".join(lines), remedy=remedy
    )


def _of_interface(host: str, missing: Sequence[str], facts: Facts) -> str:
    cards = [f"{card['name']}:{card['port']}" for card in facts.get("rdma") or ()]
    return f"{host} has no {', '.join(missing)}; it has: {', '.join([*_links(facts), *cards])}"


def _of_provider(host: str, missing: Sequence[str], facts: Facts) -> str:
    name = missing[0]
    if name in NEED_A_CARD:
        return f"{host} has no RDMA card, which {name} needs"
    return f"{name} is no provider of libfabric: did you mean {_nearest(name)}?"


def _nearest(name: str) -> str:
    return next(iter(difflib.get_close_matches(name, PROVIDERS, 1, 0.6)), "")
