"""Do the nodes reach each other on every port that a job may use, both ways?

Looks at: all pairs up to 16 hosts, beyond that rank 0's host and eight neighbours. First which
address of each host answers; then, on that address, listeners on random ports: one in each eighth
of the ephemeral range (gloo and NCCL take theirs from there), two where the rendezvous store is
placed, and 29500.
Fails when: connections are refused (a firewall rejects) or vanish (a firewall drops; half-open
connections show the direction), have no route, or reach another machine.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checks import attribution
from paceline.checks.check import (
    Check,
    ProbeSession,
    Survey,
    failed,
    join_names,
    passed,
    warned,
)
from paceline.remote import connectivity, network
from paceline.remote.fanout import gather_all
from paceline.spec.errors import PacelineError
from paceline.spec.finding import Finding

STRATA = 8
DEFAULT_PORT = 29500
TIMEOUT_S = 2.0
RETRIES = 2  # for packets that may have been lost by chance


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Chooses the addresses, then tries the ports on them."""
    hosts, survey = session.survey.present, session.survey
    try:
        candidates, notes = network.candidates(hosts, survey.facts, survey.requirements.interface)
    except PacelineError as error:  # the requested interface is missing on a host
        return {"refused": [error.message, error.found, error.remedy]}
    session.candidates = candidates
    attempts = await connectivity.probe_addresses(list(session.channels.values()), candidates)
    reachable = True
    try:
        session.networks, decision_notes = network.decide(hosts, candidates, attempts)
        notes = [*notes, *decision_notes]
        addresses = {name: chosen.address for name, chosen in session.networks.items()}
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
        # all addresses of these hosts were left out, because other hosts have them too
        "duplicates": [name for name in survey.names if not candidates[name]],
    }


async def _try_ports(session: ProbeSession, addresses: Mapping[str, str]) -> tuple[Any, Any, Any]:
    async def listen(name: str) -> list[int]:
        ports = choose_ports(session.survey.facts[name]["ephemeral_ports"])
        answer = await session.request(name, "open_ports", address=addresses[name], ports=ports)
        return list(answer["opened"])

    names = list(addresses)
    opened = dict(zip(names, await gather_all([listen(name) for name in names]), strict=True))

    async def attempt(name: str, peers: list[str]) -> list[dict[str, Any]]:
        targets = []
        for peer in peers:
            identity = session.channels[peer].identity
            target = {"host": peer, "address": addresses[peer], "identity": identity}
            targets += [{**target, "port": port} for port in opened[peer]]
        results = await _connect(session, name, targets)
        for _ in range(RETRIES):
            lost_connections = sporadic_losses(results)
            retries = [t for t in targets if (t["host"], t["port"]) in lost_connections]
            if not retries:
                break
            results = merge_results(results, await _connect(session, name, retries))
        return results

    pairs = network.probe_targets(names)
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
    """Returns host and port of time-outs on links where other ports answered.

    They are tried again: a lossy link loses some first packets, a firewall drops them every time.
    Such a link may also lose the last packet of the handshake (EBUSY: opened, then silent).
    """
    answered = {result["host"] for result in results if result["ok"]}
    return {
        (result["host"], result["port"])
        for result in results
        if result.get("errno") in (errno.ETIMEDOUT, errno.EBUSY) and result["host"] in answered
    }


def merge_results(results: Results, retried: Results) -> list[dict[str, Any]]:
    """Returns the results with those that were retried replaced."""
    merged = {(result["host"], result["port"]): dict(result) for result in [*results, *retried]}
    return list(merged.values())


def choose_ports(
    ephemeral: Sequence[int], random_generator: random.Random | None = None
) -> list[int]:
    """Returns a random port in each eighth of the ephemeral range, two outside it, and 29500."""
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
        message, found, remedy = evidence["refused"]
        hosts = [name for name in survey.names if name in message.split()]
        return [failed("ports", hosts or survey.names, f"{message}: {found}", remedy)]
    faults = attribution.faults(evidence["results"], evidence["addresses"], evidence["half_open"])
    findings = [_missing_address(survey, name) for name in evidence["duplicates"]]
    findings += [_fault_finding(survey, fault) for fault in faults]
    if findings:
        return findings
    if not evidence["reachable"]:
        return [_unreachable(survey, evidence)]
    networks = survey.networks
    chosen = ", ".join(f"{n} {networks[n].interface} {networks[n].address}" for n in survey.names)
    notes = "".join(f"; {note}" for note in evidence["notes"])
    count = sum(len(results) for results in evidence["results"].values())
    message = f"{count} connections on random ports, all answered: {chosen}{notes}"
    return [passed("ports", survey.names, message)]


def _missing_address(survey: Survey, name: str) -> Finding:
    addresses = [
        f"{link['name']} {a['address']}"
        for link in survey.interfaces(name)
        for a in link["addresses"]
        if link["kind"] != "loopback" and a["scope"] == "global"
    ]
    has = f"only {join_names(addresses)}, which other hosts have too" if addresses else "none"
    remedy = (
        f"Bring up a network interface on {name} that the other hosts reach: "
        "ip addr; sudo ip link set NAME up"
    )
    return failed("ports", [name], f"{name} has no address of its own: {has}", remedy)


def _fault_finding(survey: Survey, fault: attribution.Fault) -> Finding:
    interface = _interface(survey, fault.host)
    ports = describe_ports(fault.ports, fault.is_every_port)
    peers = join_names(fault.peers)
    peer_addresses = [_address(survey, peer) for peer in fault.peers]
    remedy = f"On {fault.host}: {network.allow_from(peer_addresses)}"
    outcome = failed
    if fault.kind == "no route":
        message = (
            f"{fault.host} has no route to {peers} ({', '.join(peer_addresses)}): {fault.error}"
        )
        remedy = _route_remedy(survey, fault.host, peer_addresses)
    elif fault.kind == "stranger":
        message = (
            f"another machine answers at {_address(survey, fault.host)}, the address of "
            f"{fault.host}, when {peers} connects"
        )
        remedy = f"Give {fault.host} an address of its own, or name another interface with --iface"
    elif fault.kind == "silent":
        message = (
            f"{fault.host} and {peers} cannot reach each other over TCP ({interface}): "
            f"packets vanish both ways on {ports}"
        )
    else:
        verb = "refuses" if fault.kind == "refused" else "drops"
        message = (
            f"{fault.host} {verb} TCP from {peers} on {ports} ({interface}): a firewall on "
            f"{fault.host} or on the way"
        )
        if fault.ports == (DEFAULT_PORT,):
            outcome = warned
    return outcome("ports", [fault.host, *fault.peers], message, remedy)


def describe_ports(ports: Sequence[int], is_every_port: bool) -> str:
    """Returns ``all 11 ports tried (20000–64000)``, or how many of them."""
    if len(ports) == 1 and not is_every_port:
        return f"port {ports[0]}"
    count = f"all {len(ports)} ports" if is_every_port else f"{len(ports)} of the ports"
    return f"{count} tried ({min(ports)}–{max(ports)})"


def _address(survey: Survey, name: str) -> str:
    return str(survey.evidence["ports"]["addresses"].get(name, survey.address(name)))


def _interface(survey: Survey, name: str) -> str:
    address = survey.evidence["ports"]["addresses"].get(name, name)
    for link in survey.interfaces(name):
        if any(a["address"] == address for a in link["addresses"]):
            return f"{link['name']} {address}"
    return str(address)


def _route_remedy(survey: Survey, host: str, peer_addresses: Sequence[str]) -> str:
    rejects = survey.evidence["ports"]["rejects"].get(host, [])
    rejected = [address for address in peer_addresses if address in rejects]
    if rejected:
        commands = (f"sudo ip route del unreachable {address}" for address in rejected)
        return f"On {host}: {' && '.join(commands)}"
    return (
        f"On {host}, look: ip route get {peer_addresses[0]}; then add a "
        "route through the interface that leads there, or name another with --iface"
    )


def _unreachable(survey: Survey, evidence: Mapping[str, Any]) -> Finding:
    """Reports that no address was reached by all, though no link failed: families differ."""
    results = [result for attempts in evidence["tried"].values() for result in attempts]
    is_refused = any(result.get("errno") == errno.ECONNREFUSED for result in results)
    message = (
        "the hosts have no address family in common on which all reach each other "
        f"({'refused' if is_refused else 'not answered'})"
    )
    remedy = (
        "Give every host an address of one family (IPv4 or IPv6), or name interfaces "
        "that reach each other with --iface"
    )
    return failed("ports", survey.names, message, remedy)


check = Check("ports", "Addresses and ports", evaluate, probe, needs_several_hosts=True)
