"""The line grammar that all host files share: ``[user@]host[:n] [key=value …]  # comment``.

One grammar reads every line dialect, so a file that mixes them is understood too. Reading it gives
mentions. What ``:n`` and repeated mentions mean is decided by rules, also in docs/hosts.md. The
number after a colon

* is the SSH port where the line says ``slots=`` too;
* is the job's rendezvous port where it is 1024 or more and only the first of several hosts
  has one;
* else is the SSH port where it is 22 or at least 1024, and slots where it is anything else.

A host that stands there more than once gets the sum of its slots, a mention without a number
counting one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.hosts.address import Word, canonical, check_user, read_word, whole_number, with_number
from paceline.hosts.dialect import Colon, Parsed, Reading, UnreadableError, bad_line
from paceline.hosts.nodelist import split_list
from paceline.spec.errors import HostsError
from paceline.spec.helptext import counted, did_you_mean
from paceline.spec.hosts import Host

MOST_SLOTS = 4096
"""More processes on one host than this are taken for a mistake."""

_KEYS = {
    "slots": "slots",
    "slot": "slots",
    "count": "slots",
    "cpu": "slots",
    "cpus": "slots",
    "user": "user",
    "username": "user",
    "user_name": "user",
    "port": "port",
    "interface": "interface",
    "ifname": "interface",
    "max_slots": "",
    "slots_max": "",
    "binding": "",
}  # what other programs write → field of Mention; "" is accepted, noted and not used
_LEGAL = ("slots", "max_slots", "user", "port", "interface")
_FORM = "a list with commas (`n1,n2`) or a line `[user@]host[:n] [slots=n]`"


@dataclass(frozen=True, slots=True)
class Mention:
    """One host on one line, as written.

    Attributes:
        number: What followed the colon; not yet known whether slots or port.
        unused: Keys that say nothing to us, as written.
        line: Counts from 1.
        text: The whole line, for errors.
    """

    address: str
    user: str | None = None
    number: int | None = None
    slots: int | None = None
    port: int | None = None
    interface: str | None = None
    unused: tuple[str, ...] = ()
    line: int = 1
    text: str = ""


def read_mentions(reading: Reading) -> list[Mention]:
    """Every mention of a host, in order. Raises HostsError with the line's number."""
    return [
        mention
        for number, line in enumerate(split_lines(reading.text), start=1)
        for mention in _located(reading.label, number, line)
    ]


def split_lines(text: str) -> list[str]:
    """Lines ended by LF, CRLF or CR; other separators are no line ends in a host file."""
    return re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff"))


def bare(line: str) -> str:
    """The line without its comment and surrounding blanks."""
    return line.split("#", 1)[0].strip()


def read_line(text: str) -> list[Mention]:
    """The mentions of one line without comment. Raises UnreadableError."""
    tidy = re.sub(r"\s*([,=])\s*", r"\1", text)
    head, *options = tidy.split()
    settings = _options(options)
    words = [word for item in _items(head) for word in read_word(item)]
    return [_mention(word, settings) for word in words]


def _located(label: str, number: int, line: str) -> list[Mention]:
    body = bare(line)
    if not body.replace("\t", " ").isprintable():
        raise bad_line(label, number, line, "no control characters")
    try:
        mentions = read_line(body) if body else []
    except UnreadableError as problem:
        raise bad_line(label, number, line, problem.expected) from None
    return [_at(mention, number, line) for mention in mentions]


def _at(mention: Mention, number: int, line: str) -> Mention:
    return replace(mention, line=number, text=line)


def _items(head: str) -> list[str]:
    items = split_list(head)
    if len(items) > 1 and not items[-1]:  # `n1,` is a list of one
        items.pop()
    if not all(items):
        raise UnreadableError("a host between the commas: `n1,n2,n3`")
    return items


def _options(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UnreadableError(_expected_after_host(word))
        field = key.lower().replace("-", "_")
        if field not in _KEYS:
            raise UnreadableError(f"for the key `{key}` {did_you_mean(key, _LEGAL)}")
        if (_KEYS[field] or field) in found:
            raise UnreadableError(f"`{key}` once on a line")
        found[_KEYS[field] or field] = value
    return found


def _expected_after_host(word: str) -> str:
    if word.isdigit():
        return f"`slots={word}` instead of `{word}`"
    return f"{_FORM}, not `{word}` after the host"


def _mention(word: Word, settings: dict[str, str]) -> Mention:
    slots, port, user = settings.get("slots"), settings.get("port"), settings.get("user")
    return Mention(
        address=word.address,
        user=check_user(user) if user else word.user,
        number=word.number,
        slots=None if slots is None else whole_number(slots, "slots", MOST_SLOTS),
        port=None if port is None else whole_number(port, "a port", 65535),
        interface=settings.get("interface"),
        unused=tuple(key for key in settings if not _KEYS.get(key, "")),
    )


# --- from mentions to hosts


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
    """Addresses that stand for several hosts behind different ports."""
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


# --- what detection needs


def peek(reading: Reading) -> Sequence[Mention]:
    """The mentions; none where the text cannot be read (its parser will say why)."""
    try:
        return read_mentions(reading)
    except HostsError:
        return ()


def has_colon(reading: Reading, meaning: Colon) -> bool:
    """Whether some ``host:n`` of the text has this meaning by the default rule."""
    mentions = peek(reading)
    return any(colon_meaning(m, mentions, reading.colon) == meaning for m in mentions)
