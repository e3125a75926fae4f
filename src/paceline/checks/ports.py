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
from paceline.checks.check import Check, Probing, Scene, every, failed, listed, passed, warned
from paceline.remote import connectivity, network
from paceline.spec.errors import PacelineError
from paceline.spec.finding import Finding

STRATA = 8
DEFAULT_PORT = 29500
TIMEOUT_S = 2.0
TRIES = 2  # further ones, for what may have been lost by chance


async def probe(probing: Probing) -> dict[str, Any]:
    """Chooses the addresses, then tries the ports on them."""
    hosts, scene = probing.scene.present, probing.scene
    try:
        found, notes = network.candidates(hosts, scene.facts, scene.wishes.interface)
    except PacelineError as error:  # what was asked for cannot be had on some host
        return {"refused": [error.message, error.found, error.remedy]}
    probing.candidates = found
    tried = await connectivity.try_addresses(list(probing.channels.values()), found, every)
    reachable = True
    try:
        probing.networks, more = network.decide(hosts, found, tried)
        notes = [*notes, *more]
        chosen = {name: own.address for name, own in probing.networks.items()}
    except PacelineError:
        reachable = False
        chosen = attribution.presumed(found, tried)
    results, half_open, rejects = await _try_ports(probing, chosen)
    return {
        "reachable": reachable,
        "notes": notes,
        "addresses": chosen,
        "tried": tried,
        "results": results,
        "half_open": half_open,
        "rejects": rejects,
        "duplicates": _duplicates(found, scene),
    }


def _duplicates(found: Mapping[str, Sequence[network.Candidate]], scene: Scene) -> list[str]:
    """Hosts all of whose addresses were left out, because others have them too."""
    return [name for name in scene.names if not found[name]]


async def _try_ports(probing: Probing, chosen: Mapping[str, str]) -> tuple[Any, Any, Any]:
    async def listen(name: str) -> list[int]:
        ports = choose_ports(probing.scene.facts[name]["ephemeral_ports"])
        answer = await probing.ask(name, "open_ports", address=chosen[name], ports=ports)
        return list(answer["opened"])

    names = list(chosen)
    opened = dict(zip(names, await every([listen(name) for name in names]), strict=True))

    async def attempt(name: str, others: list[str]) -> list[dict[str, Any]]:
        targets = [
            {
                "host": other,
                "address": chosen[other],
                "port": port,
                "identity": probing.channels[other].identity,
            }
            for other in others
            for port in opened[other]
        ]
        results = await _connect(probing, name, targets)
        for _ in range(TRIES):
            lost = lost_by_chance(results)
            again = [t for t in targets if (t["host"], t["port"]) in lost]
            if not again:
                break
            results = merged(results, await _connect(probing, name, again))
        return results

    pairs = network.pairs(names)
    results = await every([attempt(name, others) for name, others in pairs.items()])
    answers = {name: await probing.ask(name, "half_open") for name in names}
    await every([probing.ask(name, "stop_listening") for name in names])
    return (
        dict(zip(pairs, results, strict=True)),
        {name: answer["peers"] for name, answer in answers.items()},
        {name: answer["rejects"] for name, answer in answers.items()},
    )


async def _connect(probing: Probing, name: str, targets: Sequence[Any]) -> list[dict[str, Any]]:
    answer = await probing.ask(
        name, "connect", targets=targets, timeout_s=TIMEOUT_S, settle_s=TIMEOUT_S
    )
    return list(answer["results"])


Results = Sequence[Mapping[str, Any]]


def lost_by_chance(results: Results) -> set[tuple[str, int]]:
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


def merged(results: Results, again: Results) -> list[dict[str, Any]]:
    """The results, those tried again replaced."""
    newer = {(result["host"], result["port"]): result for result in again}
    return [dict(newer.get((one["host"], one["port"]), one)) for one in results]


def choose_ports(ephemeral: Sequence[int], pick: random.Random | None = None) -> list[int]:
    """A random port in each eighth of the ephemeral range, two outside of it, and 29500."""
    chance = pick or random.Random()  # noqa: S311 - not a secret
    low, high = ephemeral
    step = max(1, (high - low) // STRATA)
    ports = [chance.randrange(low + at * step, low + (at + 1) * step) for at in range(STRATA)]
    outside = [*range(20000, low), *range(high + 1, 65000)]
    ports += chance.sample(outside, 2) if len(outside) > 2 else []
    return [*dict.fromkeys([*ports, DEFAULT_PORT])]


def judge(scene: Scene) -> list[Finding]:
    found = scene.evidence["ports"]
    if "refused" in found:
        return [_refused(scene, *found["refused"])]
    lonely = [_lonely(scene, name) for name in found["duplicates"]]
    faults = attribution.faults(found["results"], found["addresses"], found["half_open"])
    findings = lonely + [_finding(scene, fault) for fault in faults]
    if not found["reachable"] and not findings:
        findings = [_unreachable(scene, found)]
    return findings or [_good(scene, found)]


def _refused(scene: Scene, message: str, found: str, remedy: str) -> Finding:
    hosts = [name for name in scene.names if name in message.split()]
    return failed("ports", hosts or scene.names, f"{message}: {found}", remedy)


def _lonely(scene: Scene, name: str) -> Finding:
    addresses = [
        f"{link['name']} {a['address']}"
        for link in scene.facts[name]["interfaces"] or []
        for a in link["addresses"]
        if link["kind"] != "loopback" and a["scope"] == "global"
    ]
    has = f"only {listed(addresses)}, which other hosts have too" if addresses else "none"
    return failed(
        "ports",
        [name],
        f"{name} has no address of its own: {has}",
        f"Bring up a network interface on {name} that the other hosts reach: "
        "ip addr; sudo ip link set NAME up",
    )


def _finding(scene: Scene, fault: attribution.Fault) -> Finding:
    where = _interface(scene, fault.host, scene.evidence["ports"]["addresses"])
    ports = describe_ports(fault.ports, fault.every_port)
    peers = listed(fault.peers)
    if fault.kind == "no route":
        return failed(
            "ports",
            [fault.host, *fault.peers],
            f"{fault.host} has no route to {peers} "
            f"({_addresses(scene, fault.peers)}): {fault.words}",
            _route_remedy(scene, fault),
        )
    if fault.kind == "stranger":
        return failed(
            "ports",
            [fault.host, *fault.peers],
            f"another machine answers at {_address(scene, fault.host)}, the address of "
            f"{fault.host}, when {peers} connects",
            f"Give {fault.host} an address of its own, or name another interface with --iface",
        )
    verb = "refuses" if fault.kind == "refused" else "drops"
    if fault.kind == "silent":
        return failed(
            "ports",
            [fault.host, *fault.peers],
            f"{fault.host} and {peers} do not hear each other over TCP ({where}): "
            f"packets vanish both ways on {ports}",
            _allow(scene, fault),
        )
    outcome = (
        f"{fault.host} {verb} TCP from {peers} on {ports} ({where}): a firewall on "
        f"{fault.host} or on the way"
    )
    if fault.ports == (DEFAULT_PORT,):
        return warned("ports", [fault.host, *fault.peers], outcome, _allow(scene, fault))
    return failed("ports", [fault.host, *fault.peers], outcome, _allow(scene, fault))


def describe_ports(ports: Sequence[int], every_port: bool) -> str:
    """``all 11 ports tried``, or from which to which."""
    if every_port:
        return f"all {len(ports)} ports tried ({min(ports)}–{max(ports)})"
    if len(ports) == 1:
        return f"port {ports[0]}"
    return f"{len(ports)} of the ports tried ({min(ports)}–{max(ports)})"


def _address(scene: Scene, name: str) -> str:
    return str(scene.evidence["ports"]["addresses"].get(name, scene.address(name)))


def _addresses(scene: Scene, names: Sequence[str]) -> str:
    return ", ".join(_address(scene, name) for name in names)


def _interface(scene: Scene, name: str, addresses: Mapping[str, str]) -> str:
    for link in scene.facts[name]["interfaces"] or []:
        if any(a["address"] == addresses.get(name) for a in link["addresses"]):
            return f"{link['name']} {addresses[name]}"
    return addresses.get(name, name)


def _route_remedy(scene: Scene, fault: attribution.Fault) -> str:
    rejects = scene.evidence["ports"]["rejects"].get(fault.host, [])
    barred = [_address(scene, peer) for peer in fault.peers if _address(scene, peer) in rejects]
    if barred:
        commands = " && ".join(f"sudo ip route del unreachable {address}" for address in barred)
        return f"On {fault.host}: {commands}"
    return (
        f"On {fault.host}, look: ip route get {_address(scene, fault.peers[0])}; then add a "
        "route through the interface that leads there, or name another with --iface"
    )


def _allow(scene: Scene, fault: attribution.Fault) -> str:
    return f"On {fault.host}: {network.allow_from([_address(scene, p) for p in fault.peers])}"


def _unreachable(scene: Scene, found: Mapping[str, Any]) -> Finding:
    """No address was reached by all although the presumed ones work: families do not match."""
    codes = Counter(r.get("errno") for tried in found["tried"].values() for r in tried)
    refused = "refused" if codes.get(errno.ECONNREFUSED) else "not answered"
    return failed(
        "ports",
        scene.names,
        f"the hosts have no address family in common on which all reach each other ({refused})",
        "Give every host an address of one family (IPv4 or IPv6), or name interfaces "
        "that reach each other with --iface",
    )


def _good(scene: Scene, found: Mapping[str, Any]) -> Finding:
    networks = scene.networks
    where = ", ".join(f"{n} {networks[n].interface} {networks[n].address}" for n in scene.names)
    notes = "".join(f"; {note}" for note in found["notes"])
    count = sum(len(results) for results in found["results"].values())
    return passed(
        "ports", scene.names, f"{count} connections on random ports, all answered: {where}{notes}"
    )


check = Check("ports", "Addresses and ports", "quick", judge, probe, several=True)
