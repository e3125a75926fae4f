"""Do the nodes reach each other on every port that a job may use, both ways?

Looks at: all pairs up to 16 hosts, rank 0's host and eight neighbours beyond. First which
address of each host answers; then on that address real listeners on random ports, one in each
eighth of the ephemeral range (gloo and NCCL take theirs from there), two where the rendezvous
store is placed, and 29500.
Fails when: connections are refused (a firewall rejects), vanish (a firewall drops; who does not
hear whom is read from half-open connections), have no route, or reach another machine.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checks import attribution
from paceline.checks.check import (
    Check,
    ProbeSession,
    Survey,
    failed,
    gather_all,
    join_names,
    passed,
    warned,
)
from paceline.remote import connectivity, network
from paceline.spec.errors import PacelineError
from paceline.spec.finding import Finding

STRATA = 8
DEFAULT_PORT = 29500
TIMEOUT_S = 2.0
RETRIES = 2  # further ones, for what may have been lost by chance


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Chooses the addresses, then tries the ports on them."""
    hosts, survey = session.survey.present, session.survey
    try:
        candidates, notes = network.candidates(hosts, survey.facts, survey.requirements.interface)
    except PacelineError as error:  # what was asked for cannot be had on some host
        return {"refused": [error.message, error.found, error.remedy]}
    session.candidates = candidates
    attempts = await connectivity.try_addresses(
        list(session.channels.values()), candidates, gather_all
    )
    reachable = True
    try:
        session.networks, decision_notes = network.decide(hosts, candidates, attempts)
        notes = [*notes, *decision_notes]
        addresses = {name: node_network.address for name, node_network in session.networks.items()}
    except PacelineError:
        reachable = False
        addresses = attribution.likely_addresses(candidates, attempts)
    results, half_open, rejects = await _try_ports(session, addresses)
    return {
        "reachable": reachable,
        "notes": notes,
        "addresses": addresses,
        "tried": attempts,
        "results": results,
        "half_open": half_open,
        "rejects": rejects,
        "duplicates": _duplicates(candidates, survey),
    }


def _duplicates(candidates: Mapping[str, Sequence[network.Candidate]], survey: Survey) -> list[str]:
    """Hosts all of whose addresses were left out, because others have them too."""
    return [name for name in survey.names if not candidates[name]]


async def _try_ports(session: ProbeSession, addresses: Mapping[str, str]) -> tuple[Any, Any, Any]:
    async def listen(name: str) -> list[int]:
        ports = choose_ports(session.survey.facts[name]["ephemeral_ports"])
        answer = await session.request(name, "open_ports", address=addresses[name], ports=ports)
        return list(answer["opened"])

    names = list(addresses)
    opened = dict(zip(names, await gather_all([listen(name) for name in names]), strict=True))

    async def attempt(name: str, peers: list[str]) -> list[dict[str, Any]]:
        targets = [
            {
                "host": peer,
                "address": addresses[peer],
                "port": port,
                "identity": session.channels[peer].identity,
            }
            for peer in peers
            for port in opened[peer]
        ]
        results = await _connect(session, name, targets)
        for _ in range(RETRIES):
            lost_connections = sporadic_losses(results)
            retries = [t for t in targets if (t["host"], t["port"]) in lost_connections]
            if not retries:
                break
            results = merge_results(results, await _connect(session, name, retries))
        return results

    pairs = network.pairs(names)
    results = await gather_all([attempt(name, peers) for name, peers in pairs.items()])
    answers = {name: await session.request(name, "half_open") for name in names}
    await gather_all([session.request(name, "stop_listening") for name in names])
    return (
        dict(zip(pairs, results, strict=True)),
        {name: answer["peers"] for name, answer in answers.items()},
        {name: answer["rejects"] for name, answer in answers.items()},
    )


async def _connect(
    session: ProbeSession, name: str, targets: Sequence[Any]
) -> list[dict[str, Any]]:
    answer = await session.request(
        name, "connect", targets=targets, timeout_s=TIMEOUT_S, settle_s=TIMEOUT_S
    )
    return list(answer["results"])


Results = Sequence[Mapping[str, Any]]


def sporadic_losses(results: Results) -> set[tuple[str, int]]:
    """Host and port of time-outs on ways where other ports answered: tried again, a few times.

    A link that loses packets loses some first packets twice; a firewall drops them every time.
    The same link may lose the last packet of a connection's opening (EBUSY: opened, and then
    silent).
    """
    answered = {result["host"] for result in results if result["ok"]}
    return {
        (result["host"], result["port"])
        for result in results
        if result.get("errno") in (errno.ETIMEDOUT, errno.EBUSY) and result["host"] in answered
    }


def merge_results(results: Results, retried: Results) -> list[dict[str, Any]]:
    """The results, those tried again replaced."""
    replacements = {(result["host"], result["port"]): result for result in retried}
    return [
        dict(replacements.get((original["host"], original["port"]), original))
        for original in results
    ]


def choose_ports(
    ephemeral: Sequence[int], random_generator: random.Random | None = None
) -> list[int]:
    """A random port in each eighth of the ephemeral range, two outside of it, and 29500."""
    generator = random_generator or random.Random()  # noqa: S311 - not a secret
    low, high = ephemeral
    step = max(1, (high - low) // STRATA)
    ports = [
        generator.randrange(low + stratum * step, low + (stratum + 1) * step)
        for stratum in range(STRATA)
    ]
    outside = [*range(20000, low), *range(high + 1, 65000)]
    ports += generator.sample(outside, 2) if len(outside) > 2 else []
    return [*dict.fromkeys([*ports, DEFAULT_PORT])]


def evaluate(survey: Survey) -> list[Finding]:
    evidence = survey.evidence["ports"]
    if "refused" in evidence:
        return [_unusable_interface(survey, *evidence["refused"])]
    unaddressed = [_missing_address(survey, name) for name in evidence["duplicates"]]
    faults = attribution.faults(evidence["results"], evidence["addresses"], evidence["half_open"])
    findings = unaddressed + [_fault_finding(survey, fault) for fault in faults]
    if not evidence["reachable"] and not findings:
        findings = [_unreachable(survey, evidence)]
    return findings or [_connections_passed(survey, evidence)]


def _unusable_interface(survey: Survey, message: str, found: str, remedy: str) -> Finding:
    hosts = [name for name in survey.names if name in message.split()]
    return failed("ports", hosts or survey.names, f"{message}: {found}", remedy)


def _missing_address(survey: Survey, name: str) -> Finding:
    addresses = [
        f"{link['name']} {a['address']}"
        for link in survey.facts[name]["interfaces"] or []
        for a in link["addresses"]
        if link["kind"] != "loopback" and a["scope"] == "global"
    ]
    description = (
        f"only {join_names(addresses)}, which other hosts have too" if addresses else "none"
    )
    return failed(
        "ports",
        [name],
        f"{name} has no address of its own: {description}",
        f"Bring up a network interface on {name} that the other hosts reach: "
        "ip addr; sudo ip link set NAME up",
    )


def _fault_finding(survey: Survey, fault: attribution.Fault) -> Finding:
    interface = _interface(survey, fault.host, survey.evidence["ports"]["addresses"])
    ports = describe_ports(fault.ports, fault.is_every_port)
    peers = join_names(fault.peers)
    if fault.kind == "no route":
        return failed(
            "ports",
            [fault.host, *fault.peers],
            f"{fault.host} has no route to {peers} "
            f"({_addresses(survey, fault.peers)}): {fault.error}",
            _route_remedy(survey, fault),
        )
    if fault.kind == "stranger":
        return failed(
            "ports",
            [fault.host, *fault.peers],
            f"another machine answers at {_address(survey, fault.host)}, the address of "
            f"{fault.host}, when {peers} connects",
            f"Give {fault.host} an address of its own, or name another interface with --iface",
        )
    verb = "refuses" if fault.kind == "refused" else "drops"
    if fault.kind == "silent":
        return failed(
            "ports",
            [fault.host, *fault.peers],
            f"{fault.host} and {peers} do not hear each other over TCP ({interface}): "
            f"packets vanish both ways on {ports}",
            _firewall_remedy(survey, fault),
        )
    outcome = (
        f"{fault.host} {verb} TCP from {peers} on {ports} ({interface}): a firewall on "
        f"{fault.host} or on the way"
    )
    if fault.ports == (DEFAULT_PORT,):
        return warned("ports", [fault.host, *fault.peers], outcome, _firewall_remedy(survey, fault))
    return failed("ports", [fault.host, *fault.peers], outcome, _firewall_remedy(survey, fault))


def describe_ports(ports: Sequence[int], is_every_port: bool) -> str:
    """``all 11 ports tried``, or from which to which."""
    if is_every_port:
        return f"all {len(ports)} ports tried ({min(ports)}–{max(ports)})"
    if len(ports) == 1:
        return f"port {ports[0]}"
    return f"{len(ports)} of the ports tried ({min(ports)}–{max(ports)})"


def _address(survey: Survey, name: str) -> str:
    return str(survey.evidence["ports"]["addresses"].get(name, survey.address(name)))


def _addresses(survey: Survey, names: Sequence[str]) -> str:
    return ", ".join(_address(survey, name) for name in names)


def _interface(survey: Survey, name: str, addresses: Mapping[str, str]) -> str:
    for link in survey.facts[name]["interfaces"] or []:
        if any(a["address"] == addresses.get(name) for a in link["addresses"]):
            return f"{link['name']} {addresses[name]}"
    return addresses.get(name, name)


def _route_remedy(survey: Survey, fault: attribution.Fault) -> str:
    rejects = survey.evidence["ports"]["rejects"].get(fault.host, [])
    rejected = [_address(survey, peer) for peer in fault.peers if _address(survey, peer) in rejects]
    if rejected:
        commands = " && ".join(f"sudo ip route del unreachable {address}" for address in rejected)
        return f"On {fault.host}: {commands}"
    return (
        f"On {fault.host}, look: ip route get {_address(survey, fault.peers[0])}; then add a "
        "route through the interface that leads there, or name another with --iface"
    )


def _firewall_remedy(survey: Survey, fault: attribution.Fault) -> str:
    return f"On {fault.host}: {network.allow_from([_address(survey, p) for p in fault.peers])}"


def _unreachable(survey: Survey, evidence: Mapping[str, Any]) -> Finding:
    """No address was reached by all although the presumed ones work: families do not match."""
    codes = Counter(r.get("errno") for attempts in evidence["tried"].values() for r in attempts)
    refused = "refused" if codes.get(errno.ECONNREFUSED) else "not answered"
    return failed(
        "ports",
        survey.names,
        f"the hosts have no address family in common on which all reach each other ({refused})",
        "Give every host an address of one family (IPv4 or IPv6), or name interfaces "
        "that reach each other with --iface",
    )


def _connections_passed(survey: Survey, evidence: Mapping[str, Any]) -> Finding:
    networks = survey.networks
    addresses = ", ".join(
        f"{n} {networks[n].interface} {networks[n].address}" for n in survey.names
    )
    notes = "".join(f"; {note}" for note in evidence["notes"])
    count = sum(len(results) for results in evidence["results"].values())
    return passed(
        "ports",
        survey.names,
        f"{count} connections on random ports, all answered: {addresses}{notes}",
    )


check = Check("ports", "Addresses and ports", "quick", evaluate, probe, needs_several_hosts=True)
