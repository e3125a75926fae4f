"""From mentions to hosts: what ``:n`` means, and what a repeated host means.

The rules, also in docs/hosts.md. The number after a colon

* is the SSH port where the line says ``slots=`` too;
* is the job's rendezvous port where it is 1024 or more and only the first of several hosts
  has one;
* else is the SSH port where it is 22 or at least 1024, and slots where it is anything else.

A host that stands there more than once gets the sum of its slots, a mention without a number
counting one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.hosts.address import canonical, with_number
from paceline.hosts.dialect import Colon, Parsed, Reading
from paceline.hosts.lines import MOST_SLOTS, Mention, read_mentions
from paceline.hosts.problems import bad_line
from paceline.spec.helptext import counted
from paceline.spec.hosts import Host

FIRST_USER_PORT = 1024
SSH_PORT = 22


def parse_lines(reading: Reading) -> Parsed:
    """Hosts and notes of a text in the line grammar."""
    mentions = read_mentions(reading)
    meanings = [colon_meaning(m, mentions, reading.colon) for m in mentions]
    _check_slots(reading.label, mentions, meanings)
    settled = [settle(m, meaning) for m, meaning in zip(mentions, meanings, strict=True)]
    hosts, repeats = merge(reading.label, settled)
    colons = [] if reading.colon else _colon_notes(mentions, meanings)
    return Parsed(hosts, (*colons, *repeats, *_unused_notes(mentions)))


def colon_meaning(mention: Mention, among: Sequence[Mention], choice: Colon | None) -> Colon | None:
    """What the number after this mention's colon says; ``None`` where there is no number."""
    if mention.number is None:
        return None
    if mention.slots is not None:
        return "port"
    if choice:
        return choice
    if names_rendezvous(among):
        return "rendezvous"
    return "port" if _is_port(mention.number) else "slots"


def names_rendezvous(mentions: Sequence[Mention]) -> bool:
    """Whether the first of several hosts alone has a number, and one that only a port can be."""
    numbers = [m.number for m in mentions if m.number is not None and m.slots is None]
    first = mentions[0].number if mentions else None
    return len(mentions) > 1 and numbers == [first] and (first or 0) >= FIRST_USER_PORT


def settle(mention: Mention, meaning: Colon | None) -> Mention:
    """The mention with its number moved to where it belongs."""
    if meaning == "slots":
        return replace(mention, slots=mention.number, number=None)
    if meaning == "port":
        return replace(mention, port=mention.port or mention.number, number=None)
    return replace(mention, number=None)


def merge(label: str, mentions: Sequence[Mention]) -> tuple[tuple[Host, ...], list[str]]:
    """One host for each address and port, in the order of first mention, with notes."""
    groups: dict[tuple[str, int | None], list[Mention]] = {}
    for mention in mentions:
        groups.setdefault((canonical(mention.address), mention.port), []).append(mention)
    each_is_a_slot = any(_repeats_bare(group) for group in groups.values())
    shared = _shared_addresses(list(groups))
    hosts = [_host(label, group, each_is_a_slot, shared) for group in groups.values()]
    notes = [_repeat_note(h, g) for h, g in zip(hosts, groups.values(), strict=True) if len(g) > 1]
    return tuple(hosts), _few(notes)


def _host(label: str, group: list[Mention], each_is_a_slot: bool, shared: set[str]) -> Host:
    first = group[0]
    for other in group[1:]:
        if (other.user, other.interface) != (first.user, first.interface):
            expected = f"the user and interface that line {first.line} gives this host"
            raise bad_line(label, other.line, other.text, expected)
    ambiguous = canonical(first.address) in shared
    return Host(
        name=with_number(first.address, first.port) if ambiguous else first.address,
        address=first.address,
        slots=_slots(group, each_is_a_slot),
        user=first.user,
        port=first.port,
        interface=first.interface,
    )


def _slots(group: list[Mention], each_is_a_slot: bool) -> int | None:
    if len(group) == 1 and not each_is_a_slot:
        return group[0].slots
    return sum(1 if m.slots is None else m.slots for m in group)


def _repeats_bare(group: list[Mention]) -> bool:
    return len(group) > 1 and all(m.slots is None for m in group)


def _shared_addresses(keys: list[tuple[str, int | None]]) -> set[str]:
    """Addresses that stand for several machines behind different ports."""
    addresses = [address for address, _ in keys]
    return {address for address in addresses if addresses.count(address) > 1}


def _check_slots(label: str, mentions: Sequence[Mention], meanings: Sequence[Colon | None]) -> None:
    for mention, meaning in zip(mentions, meanings, strict=True):
        if meaning == "slots" and (mention.number or 0) > MOST_SLOTS:
            expected = f"at most {MOST_SLOTS} slots; `--colon port` reads the number as a port"
            raise bad_line(label, mention.line, mention.text, expected)


def _is_port(number: int) -> bool:
    return number == SSH_PORT or number >= FIRST_USER_PORT


def _repeat_note(host: Host, group: list[Mention]) -> str:
    lines = sorted({mention.line for mention in group})
    where = f" (lines {', '.join(map(str, lines))})" if len(lines) > 1 else ""
    return f"`{host.name}` is listed {len(group)} times{where}: its slots add up to {host.slots}"


def _colon_notes(mentions: Sequence[Mention], meanings: Sequence[Colon | None]) -> list[str]:
    pairs = list(zip(mentions, meanings, strict=True))
    notes = []
    for meaning in ("slots", "port", "rendezvous"):
        alike = [m for m, found in pairs if found == meaning and m.slots is None]
        if alike:
            notes.append(_colon_note(alike[0], meaning) + _and_more(len(alike) - 1))
    return notes


def _colon_note(mention: Mention, meaning: str) -> str:
    written = f"`{with_number(mention.address, mention.number)}`"
    if meaning == "slots":
        slots = counted(mention.number or 0, "slot")
        return f"{written} was read as {slots}; `--colon port` reads an SSH port"
    if meaning == "port":
        return f"{written} was read as SSH port {mention.number}; `--colon slots` reads slots"
    return (
        f"{written} was read as rendezvous port {mention.number}, not needed here: "
        "a free one is found; `--colon port` reads an SSH port"
    )


def _unused_notes(mentions: Sequence[Mention]) -> list[str]:
    keys = list(dict.fromkeys(key for mention in mentions for key in mention.unused))
    return [f"`{key}=` was ignored: Paceline has no use for it" for key in keys]


def _and_more(count: int) -> str:
    return f" ({count} more alike)" if count else ""


def _few(notes: list[str], most: int = 3) -> list[str]:
    left = len(notes) - most
    return notes if left <= 0 else [*notes[:most], f"{left} more hosts are listed several times"]
