"""The line grammar that all host files share: ``[user@]host[:n] [key=value …]  # comment``.

One grammar reads every line dialect, so a file that mixes them is understood too. Reading it
gives mentions; what ``:n`` and repeated mentions mean is decided in ``mentions.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from paceline.hosts.address import Word, check_user, read_word, whole_number
from paceline.hosts.dialect import Reading, UnreadableError
from paceline.hosts.nodelist import split_list
from paceline.hosts.problems import bad_line, did_you_mean

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
