"""The line grammar that all host files share: ``[user@]host[:n] [key=value …]  # comment``.

One grammar reads every line dialect, so files may mix them. A line may also be an ssh call
(``ssh me@host -p 2222``) or a line of ``/etc/hosts`` (``10.0.0.2 n2``). The rules for ``:n`` and
repeated mentions are also in docs/how-to/describe-hosts.md. The number after a colon is

* the SSH port if the line also has ``slots=``;
* the job's rendezvous port if it is 1024 or more and only the first of several hosts has one;
* else the SSH port if it is 22 or at least 1024, and slots otherwise.

A host that is mentioned more than once gets the sum of its slots; a mention without a number
counts as one.
"""

from __future__ import annotations

import getopt
import ipaddress
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.hosts.address import (
    HostToken,
    canonical_address,
    check_address,
    check_user,
    join_number,
    parse_host_token,
    parse_integer,
    parse_ip,
)
from paceline.hosts.dialect import (
    MAX_LINE_CHARS,
    ColonMeaning,
    Parsed,
    Reading,
    UnreadableError,
    line_error,
)
from paceline.hosts.nodelist import MAX_HOSTS, collect, split_list
from paceline.spec.errors import HostsError
from paceline.spec.formatting import pluralize, suggest
from paceline.spec.hosts import Host

MAX_SLOTS = 4096
"""More processes on one host are taken for a mistake."""

_FIELD_KEYS = {
    "slots": "slots slot count cpu cpus gpu gpus num_gpus",
    "user": "user username user_name ansible_user ansible_ssh_user",
    "port": "port ansible_port ansible_ssh_port",
    "interface": "interface ifname",
    "address": "address ip ansible_host ansible_ssh_host",
    "identity_file": "key ansible_private_key_file ansible_ssh_private_key_file",
    "": "max_slots slots_max binding",
}  # field of Mention → keys of other programs; those of "" are accepted, noted and not used
KEYS = {key: field for field, keys in _FIELD_KEYS.items() for key in keys.split()}
_DOCUMENTED_KEYS = ("slots", "max_slots", "user", "port", "interface", "address", "key")
_EXPECTED_FORM = "a list with commas (`n1,n2`) or a line `[user@]host[:n] [slots=n]`"

_BLANKS = "\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000"
_INVISIBLE = "\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff"
_PASTED_CHARACTERS = (
    (re.compile(f"[{_BLANKS}]"), " "),
    (re.compile(f"[{_INVISIBLE}]"), ""),
    (re.compile(r"(?<=[0-9])[\u2010-\u2015\u2212](?=[0-9])"), "-"),  # of a range
    (re.compile("[\u201c-\u201f]"), '"'),
    (re.compile(r"(?<![^\s,;=])([\"'])([^\"']*)\1(?![^\s,;=])"), r"\2"),
)
"""Characters in text copied from a page or a table, and their replacements."""

_SSH_FLAGS = "46AaCfGgKkMNnqsTtVvXxYyB:b:c:D:E:e:F:I:i:J:L:l:m:O:o:P:p:Q:R:S:W:w:"
_SSH_SETTINGS = {"-l": "user", "-p": "port", "-i": "identity_file"}
_SSH_ROUTE_FLAGS = ("-b", "-F", "-I", "-J", "-o", "-W")

_FOREIGN_SYNTAX = (
    (
        re.compile(r"rank\s*\d+\s*="),
        "one host a line with its number of processes, `n1 slots=2`: "
        "this is a rankfile, which binds Open MPI's ranks to cores",
    ),
    (
        re.compile(r"\^|-[xwga]\s"),
        "hosts only, one a line or `node[01-04]`: `^FILE`, `-w`, `-x` and `-g` are options of "
        "pdsh. Give FILE to -H, and leave out the hosts that `-x` excludes",
    ),
    (
        re.compile(r"@[\w*:.-]+(\s|$)"),
        "a login name before the `@`; of a group its hosts, which `nodeset -e @gpu` prints",
    ),
    (
        re.compile(r"[^#]*\{[^{}]*(,|\.\.)[^{}]*\}"),
        "`node[01-04,07]`: ranges in braces are the shell's",
    ),
    (
        re.compile(r"\S+ (ssh-|ecdsa-|sk-)"),
        "host names only: this is a known_hosts file, whose first column holds them",
    ),
    (
        re.compile(r"(export\s+)?[A-Za-z_][\w.-]*=\S"),
        "a host before the first `key=value` (`n1 slots=2`), or a list (`n1,n2`)",
    ),
    (re.compile(r"[A-Za-z]+://"), "a host: `n1`, `me@n1:2222` or `ssh://me@n1:2222`"),
    (re.compile(r"<[?!A-Za-z]"), "one host a line: this is XML or a web page"),
)
"""Lines of other programs' files, and what to write instead."""


@dataclass(frozen=True, slots=True)
class Mention:
    """One host on one line, as written.

    Attributes:
        name: The user's name for the host, if it also has an address.
        number: Number after the colon; slots or port.
        unused: Ignored keys, as written.
        line: Line number, from 1.
        text: The whole line, for errors.
    """

    address: str
    user: str | None = None
    number: int | None = None
    slots: int | None = None
    port: int | None = None
    interface: str | None = None
    identity_file: str | None = None
    name: str | None = None
    unused: tuple[str, ...] = ()
    line: int = 1
    text: str = ""


def read_mentions(reading: Reading) -> list[Mention]:
    """Returns every mention of a host, in order. Raises HostsError with the line's number."""
    mentions: list[Mention] = []
    for number, line in enumerate(split_lines(reading.text), start=1):
        found = _read_numbered_line(reading.label, number, line)
        mentions += (replace(mention, line=number, text=line) for mention in found)
        if len(mentions) > MAX_HOSTS:
            raise line_error(reading.label, number, line, f"at most {MAX_HOSTS} hosts")
    return mentions


def split_lines(text: str) -> list[str]:
    """Splits at LF, CRLF or CR; other separators do not end lines of a host file."""
    return re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff"))


def strip_comment(line: str) -> str:
    """Returns the line without comment, quotes, invisible characters and surrounding blanks."""
    if not line or line.isspace():
        return ""
    body = "" if line.lstrip().startswith((";", "//")) else line.split("#", 1)[0]
    for pattern, replacement in _PASTED_CHARACTERS:
        body = pattern.sub(replacement, body)
    return body.strip()


def read_line(text: str) -> list[Mention]:
    """Returns the mentions of one line without comment. Raises UnreadableError."""
    text = " ".join(text.split())  # long runs of blanks would take quadratic time below
    normalized = re.sub(r"\s*[,;]\s*", ",", re.sub(r"\s*=\s*", "=", text))
    head, *options = normalized.split()
    has_flags = any(re.match(r"-[A-Za-z46]", option) for option in options)
    if (head == "ssh" and options) or head.startswith("ssh://") or has_flags:
        return _ssh_call(options if head == "ssh" else [head, *options])
    ip = parse_ip(head)
    if ip is not None and options and not any("=" in token for token in options):
        return _hosts_entry(ip, head, options)
    settings = _options(options)
    tokens = collect(parse_host_token(item) for item in _items(head))
    return [_mention(token, settings) for token in tokens]


def _ssh_call(arguments: list[str]) -> list[Mention]:
    """Reads ``[ssh] [user@]host -p N -i KEY`` or ``ssh://user@host:N``."""
    try:
        flags, operands = getopt.gnu_getopt(arguments, _SSH_FLAGS)
    except getopt.GetoptError as problem:
        raise UnreadableError(f"an ssh call as ssh takes it ({problem.msg})") from None
    if len(operands) != 1:
        raise UnreadableError("one host and no command in an ssh call: `ssh me@n1 -p 2222`")
    settings = {_SSH_SETTINGS[flag]: value for flag, value in flags if flag in _SSH_SETTINGS}
    unsupported = [flag for flag, _ in flags if flag in _SSH_ROUTE_FLAGS]
    if unsupported:
        raise UnreadableError(
            f"an ssh call without `{unsupported[0]}`: put that into a `Host` block of "
            "~/.ssh/config and write the block's name here"
        )
    target = re.sub(r"^ssh://|/$", "", operands[0])
    mentions = []
    for token in parse_host_token(target):
        port = {} if token.number is None else {"port": str(token.number)}
        mentions.append(_mention(replace(token, number=None), {**port, **settings}))
    return mentions


def _hosts_entry(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, address: str, names: list[str]
) -> list[Mention]:
    """Reads a line of ``/etc/hosts``; skips the addresses that every machine has."""
    if ip.is_loopback or ip.is_multicast or ip.is_unspecified or address == "255.255.255.255":
        return []
    if not all(re.match("[A-Za-z]", name) for name in names):
        raise UnreadableError(_expected_after_host(names[0]))
    return [Mention(address, name=check_address(names[0]))]


def _read_numbered_line(label: str, number: int, line: str) -> list[Mention]:
    body = strip_comment(line)
    if not body.replace("\t", " ").isprintable():
        raise line_error(label, number, line, "no control characters")
    try:
        return read_line(body) if body else []
    except UnreadableError as problem:
        forms = (
            advice for pattern, advice in _FOREIGN_SYNTAX if pattern.match(body[:MAX_LINE_CHARS])
        )
        raise line_error(label, number, line, next(forms, problem.expected)) from None


def _items(head: str) -> list[str]:
    items = split_list(head)
    if len(items) > 1 and not items[-1]:  # `n1,` is a list of one
        items.pop()
    if not all(items):
        raise UnreadableError("a host between the commas: `n1,n2,n3`")
    return items


def _options(options: list[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not value:
            raise UnreadableError(_expected_after_host(option))
        field = key.lower().replace("-", "_")
        if field not in KEYS and not field.startswith("ansible_"):
            raise UnreadableError(f"the key `{key}` to be {suggest(key, _DOCUMENTED_KEYS)}")
        meaning = KEYS.get(field) or field
        if meaning in settings:
            raise UnreadableError(f"`{key}` once on a line, and one host a line")
        settings[meaning] = value
    return settings


def _expected_after_host(text: str) -> str:
    if text.isdigit():
        return f"`slots={text}` instead of `{text}`"
    return f"{_EXPECTED_FORM}, not `{text}` after the host"


def _mention(token: HostToken, settings: dict[str, str]) -> Mention:
    slots, port, user = settings.get("slots"), settings.get("port"), settings.get("user")
    address = settings.get("address")
    return Mention(
        address=token.address if address is None else check_address(address),
        name=token.address if address is not None else None,
        user=check_user(user) if user else token.user,
        number=token.number,
        slots=None if slots is None else parse_integer(slots, "slots", MAX_SLOTS),
        port=None if port is None else parse_integer(port, "a port", 65535),
        interface=settings.get("interface"),
        identity_file=settings.get("identity_file"),
        unused=tuple(key for key in settings if key not in _FIELD_KEYS),
    )


# --- from mentions to hosts


FIRST_USER_PORT = 1024
SSH_PORT = 22
MAX_NOTES = 3  # of a kind


def parse_lines(reading: Reading) -> Parsed:
    """Returns hosts and notes of a text in the line grammar."""
    return hosts_of(reading, read_mentions(reading))


def hosts_of(reading: Reading, mentions: Sequence[Mention]) -> Parsed:
    """Returns hosts and notes of the mentions. Raises HostsError if they are contradictory."""
    meanings = [colon_meaning(m, mentions, reading.colon) for m in mentions]
    _check_slots(reading.label, mentions, meanings)
    resolved = [resolve_number(m, meaning) for m, meaning in zip(mentions, meanings, strict=True)]
    hosts, repeats = merge(reading.label, resolved)
    colons = [] if reading.colon else _colon_notes(mentions, meanings)
    return Parsed(hosts, (*colons, *repeats, *_unused_notes(mentions)))


def colon_meaning(
    mention: Mention, mentions: Sequence[Mention], choice: ColonMeaning | None
) -> ColonMeaning | None:
    """Returns the meaning of the number after a mention's colon; ``None`` without a number."""
    if mention.number is None:
        return None
    if mention.slots is not None:
        return "port"
    if choice:
        return choice
    if names_rendezvous(mentions):
        return "rendezvous"
    is_port = mention.number == SSH_PORT or mention.number >= FIRST_USER_PORT
    return "port" if is_port else "slots"


def names_rendezvous(mentions: Sequence[Mention]) -> bool:
    """Whether only the first of several hosts has a number, and it can only be a port."""
    numbers = [m.number for m in mentions if m.number is not None and m.slots is None]
    first = mentions[0].number if mentions else None
    return len(mentions) > 1 and numbers == [first] and (first or 0) >= FIRST_USER_PORT


def resolve_number(mention: Mention, meaning: ColonMeaning | None) -> Mention:
    """Returns the mention with its number moved to slots or port."""
    if meaning == "slots":
        return replace(mention, slots=mention.number, number=None)
    if meaning == "port":
        return replace(mention, port=mention.port or mention.number, number=None)
    return replace(mention, number=None)


def merge(label: str, mentions: Sequence[Mention]) -> tuple[tuple[Host, ...], list[str]]:
    """Returns one host for each address and port, in order of first mention, with notes."""
    groups: dict[tuple[str, int | None], list[Mention]] = {}
    second_addresses = []
    for mention in mentions:
        name = canonical_address(mention.name or mention.address)
        group = groups.setdefault((name, None if mention.name else mention.port), [])
        addresses = {canonical_address(m.address) for m in (mention, *group[:1])}
        if mention.name and len(addresses) > 1:
            note = f"`{mention.name}` has several addresses: {group[0].address} is taken"
            second_addresses.append(note)
        else:
            group.append(mention)
    count_mentions = any(
        len(group) > 1 and all(m.slots is None for m in group) for group in groups.values()
    )
    num_ports = Counter(address for address, _ in groups)
    hosts = [_host(label, group, count_mentions, num_ports) for group in groups.values()]
    notes = [_repeat_note(h, g) for h, g in zip(hosts, groups.values(), strict=True) if len(g) > 1]
    if len(notes) > MAX_NOTES:
        notes[MAX_NOTES:] = [f"{len(notes) - MAX_NOTES} more hosts are listed several times"]
    return tuple(hosts), [*notes, *second_addresses[:MAX_NOTES]]


def _host(
    label: str, group: list[Mention], count_mentions: bool, num_ports: Mapping[str, int]
) -> Host:
    first = group[0]
    for mention in group[1:]:
        if (mention.user, mention.interface) != (first.user, first.interface):
            expected = f"the user and interface that line {first.line} gives this host"
            raise line_error(label, mention.line, mention.text, expected)
    name = first.name or first.address
    is_ambiguous = num_ports[canonical_address(name)] > 1
    slots = first.slots
    if len(group) > 1 or count_mentions:
        slots = sum(1 if m.slots is None else m.slots for m in group)
    return Host(
        name=join_number(name, first.port) if is_ambiguous else name,
        address=first.address,
        slots=slots,
        user=first.user,
        port=first.port,
        interface=first.interface,
        identity_file=first.identity_file,
    )


def _check_slots(
    label: str, mentions: Sequence[Mention], meanings: Sequence[ColonMeaning | None]
) -> None:
    for mention, meaning in zip(mentions, meanings, strict=True):
        if meaning == "slots" and (mention.number or 0) > MAX_SLOTS:
            expected = f"at most {MAX_SLOTS} slots; `--colon port` reads the number as a port"
            raise line_error(label, mention.line, mention.text, expected)


def _repeat_note(host: Host, group: list[Mention]) -> str:
    lines = sorted({mention.line for mention in group})
    line_numbers = f" (lines {', '.join(map(str, lines))})" if len(lines) > 1 else ""
    times = f"{len(group)} times{line_numbers}"
    return f"`{host.name}` is listed {times}: its slots add up to {host.slots}"


_COLON_NOTES = {
    "slots": "was read as {slots}; `--colon port` reads an SSH port",
    "port": "was read as SSH port {number}; `--colon slots` reads slots",
    "rendezvous": "was read as rendezvous port {number}, not needed here: a free one is found; "
    "`--colon port` reads an SSH port",
}


def _colon_notes(mentions: Sequence[Mention], meanings: Sequence[ColonMeaning | None]) -> list[str]:
    notes = []
    pairs = [(m, meaning) for m, meaning in zip(mentions, meanings, strict=True) if m.slots is None]
    for meaning, text in _COLON_NOTES.items():
        matches = [mention for mention, own_meaning in pairs if own_meaning == meaning]
        if matches:
            number = matches[0].number or 0
            note = text.format(number=number, slots=pluralize(number, "slot"))
            more = f" ({len(matches) - 1} more alike)" if len(matches) > 1 else ""
            notes.append(f"`{join_number(matches[0].address, number)}` {note}{more}")
    return notes


def _unused_notes(mentions: Sequence[Mention]) -> list[str]:
    keys = list(dict.fromkeys(key for mention in mentions for key in mention.unused))
    return [f"`{key}=` was ignored: Paceline has no use for it" for key in keys]


# --- what detection needs


def try_read_mentions(reading: Reading) -> Sequence[Mention]:
    """Returns the mentions, or none if the text cannot be read; its parser raises the error."""
    try:
        return read_mentions(reading)
    except HostsError:
        return ()


def has_colon(reading: Reading, meaning: ColonMeaning) -> bool:
    """Whether a ``host:n`` of the text has this meaning by the default rule."""
    mentions = try_read_mentions(reading)
    return any(colon_meaning(m, mentions, reading.colon) == meaning for m in mentions)
