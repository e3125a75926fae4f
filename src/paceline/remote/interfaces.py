"""Variables that select the network interface of libraries: set for each node, and validated.

Each node gets its own values, because interface names differ. The user's values for all ranks are
checked on each host.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host

Facts = Mapping[str, Any]
# gloo and TensorPipe, then libfabric over TCP for MPI libraries and oneCCL
EXACT = (
    "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "FI_TCP_IFACE", "FI_SOCKETS_IFACE",
    "I_MPI_HYDRA_IFACE",
)  # fmt: skip
NCCL, UCX, PROVIDER = "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES", "FI_PROVIDER"
RDMA_PROVIDERS = ("verbs", "efa", "mlx")  # libfabric providers that need an RDMA card
PROVIDERS = (
    *RDMA_PROVIDERS, "tcp", "sockets", "udp", "shm", "sm2", "psm", "psm2", "psm3", "opx", "cxi",
    "usnic", "ofi_rxm", "ofi_rxd", "ofi_mrail", "lnx",
)  # fmt: skip
MAX_LINES = 8  # lines of an error


def variables(interface: str, facts: Facts) -> dict[str, str]:
    """The variables of a node's ranks: its interface for the job, and its RDMA cards."""
    # "=" asks NCCL for exactly this name; alone it would be a prefix
    values = {**dict.fromkeys(EXACT, interface), NCCL: f"={interface}"}
    devices = ucx_devices(interface, facts)
    return {**values, UCX: devices} if devices else values


def ucx_devices(interface: str, facts: Facts) -> str:
    """UCX's devices: the interface and the port of its card; empty leaves the choice to UCX.

    If the node has only cards of other interfaces, naming this interface would exclude them.
    """
    cards = [card for card in facts.get("rdma") or () if card["active"]]
    ports = [f"{card['name']}:{card['port']}" for card in cards if interface in card["interfaces"]]
    return "" if cards and not ports else ",".join([*ports, interface])


def validate_variables(hosts: Sequence[Host], facts: Mapping[str, Facts],
                       environment: Mapping[str, str]) -> None:  # fmt: skip
    """Raises SettingError if a variable names an interface or provider that a host lacks.

    Libraries would silently use another (libfabric), or fail in the first collective.
    """
    for variable in (*EXACT, NCCL, UCX, PROVIDER):
        value, find_missing = environment.get(variable, ""), _MISSING.get(variable, _exact)
        missing = {host.name: [*find_missing(value, facts[host.name])] for host in hosts}
        lacking = {name: absent for name, absent in missing.items() if absent}
        if lacking:
            raise _absent(variable, value, lacking, facts)


def _links(facts: Facts) -> list[str]:
    return [str(link["name"]) for link in facts["interfaces"] or ()]


def _items(value: str) -> list[str]:
    return [item.strip() for item in value.split(",") if item.strip()]


def _exact(value: str, facts: Facts) -> Iterator[str]:
    available = _links(facts)
    yield from (name for name in _items(value) if available and name not in available)


def _nccl(value: str, facts: Facts) -> Iterator[str]:
    """A list of prefixes, of names after ``=``; after ``^`` of what is not to be used."""
    names, is_exact = _links(facts), value.startswith("=")
    prefixes = _items(value.removeprefix("="))
    if not names or not prefixes or value.startswith("^"):
        return
    if not any(name == prefix if is_exact else name.startswith(prefix)
               for name in names for prefix in prefixes):  # fmt: skip
        yield ",".join(prefixes)


def _ucx(value: str, facts: Facts) -> Iterator[str]:
    """Interfaces and ports of cards, patterns of both, ``all``; after ``^`` what is not used."""
    names = _links(facts)
    cards = [str(card["name"]) for card in facts.get("rdma") or ()]
    if not names or value.startswith("^"):
        return
    for device in _items(value):
        is_literal = re.fullmatch(r"[\w.-]+(?::\d+)?", device)
        if is_literal and device != "all" and device.split(":")[0] not in (*names, *cards):
            yield device


def _provider(value: str, facts: Facts) -> Iterator[str]:
    cards = facts.get("rdma")
    if value.startswith("^"):
        return
    for provider in re.split(r"[,;]", value.lower()):
        lacks_card = provider in RDMA_PROVIDERS and cards == []
        if lacks_card or (provider not in PROVIDERS and _closest(provider)):
            yield provider


_MISSING: dict[str, Callable[[str, Facts], Iterator[str]]] = {
    NCCL: _nccl, UCX: _ucx, PROVIDER: _provider,
}  # fmt: skip


def _absent(variable: str, value: str, lacking: Mapping[str, Sequence[str]],
            facts: Mapping[str, Facts]) -> SettingError:  # fmt: skip
    describe = _of_provider if variable == PROVIDER else _of_interface
    lines = [describe(host, lacking[host], facts[host]) for host in list(lacking)[:MAX_LINES]]
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
    if name in RDMA_PROVIDERS:
        return f"{host} has no RDMA card, which {name} needs"
    return f"{name} is not a provider of libfabric: did you mean {_closest(name)}?"


def _closest(name: str) -> str:
    return next(iter(difflib.get_close_matches(name, PROVIDERS, 1, 0.6)), "")
