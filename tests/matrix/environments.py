"""The axes on which real sites differ, and a selection that meets every pair of their values.

Pure: what the values mean is in ``sites.py``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

SEED = 3


@dataclass(frozen=True)
class Environment:
    """One combination: a value for each axis.

    Attributes:
        home: Each host's own, one for all, or one for all at another path on the second host.
        project: The hosts see the launcher's folder, or its code is shipped.
        tmp: ``/tmp`` of each host: its own, one for all, or mounted noexec.
        cache: Where ``XDG_CACHE_HOME`` is: below the home (unset), or in ``/tmp``.
        user: Who logs in: root, one ordinary user, or another user on each host.
        umask: Of the login and of the launcher.
        shell: The login shell.
        startup: What the login shell's start-up file does. ``execs`` hands the command over to
            another shell; ``exits`` ends the shell, or replaces it by one that never gets the
            command.
        python: The second host's interpreter is at the same or at a different path.
        network: ``mixed``: IPv6 everywhere, and IPv4 on the first host only.
        names: What host names mean on the hosts: addresses; the own name 127.0.1.1, as Debian
            has it; a dead interface and, for the others, an address that nobody has; nothing.
        shm: ``/dev/shm`` of the hosts: as large as usual, or 64 KiB.
        quota: The home holds as much as the disk, or 96 MiB (a small file system: a quota gives
            another error number, the same moment).
        cpus: A login may use all, or one.
        launcher: Where paceline is typed: outside, or on the first host by the login's user.
    """

    home: str
    project: str
    tmp: str
    cache: str
    user: str
    umask: str
    shell: str
    startup: str
    python: str
    network: str
    names: str
    shm: str
    quota: str
    cpus: str
    launcher: str

    def __str__(self) -> str:
        return " ".join(f"{axis}={getattr(self, axis)}" for axis in AXES)

    @property
    def is_usable(self) -> bool:
        """Whether a login can run commands at all; otherwise a clear error is expected."""
        return self.startup != "exits"

    def values(self) -> tuple[Value, ...]:
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))


Value = tuple[str, str]  # axis, value
Pair = frozenset[Value]

AXES: Mapping[str, tuple[str, ...]] = {
    "home": ("private", "shared", "moved"),
    "project": ("seen", "shipped"),
    "tmp": ("private", "shared", "noexec"),
    "cache": ("home", "tmp"),
    "user": ("root", "ordinary", "different"),
    "umask": ("022", "077", "000"),
    "shell": ("bash", "zsh", "fish", "tcsh", "dash"),
    "startup": ("silent", "prints", "reads", "execs", "exits"),
    "python": ("same", "different"),
    "network": ("ipv4", "ipv6", "mixed"),
    "names": ("known", "loopback", "wrong", "unknown"),
    "shm": ("normal", "small"),
    "quota": ("none", "small"),
    "cpus": ("all", "one"),
    "launcher": ("outside", "first-host"),
}

_NO_FILE = "dash reads no start-up file for a command"
CONSTRAINTS: tuple[tuple[Value, Value, str], ...] = (
    (("home", "shared"), ("user", "different"), "a home has one owner"),
    (("home", "moved"), ("user", "different"), "a home has one owner"),
    (("shell", "dash"), ("startup", "reads"), _NO_FILE),
    (("shell", "dash"), ("startup", "execs"), _NO_FILE),
    (("shell", "dash"), ("startup", "exits"), _NO_FILE),
    (("shell", "dash"), ("umask", "000"), f"sshd's umask is 022 at least, and {_NO_FILE}"),
)
_EXCLUDED = frozenset(frozenset((first, second)) for first, second, _ in CONSTRAINTS)
_CANDIDATES = 20


def is_possible(values: Sequence[Value]) -> bool:
    """Whether these values can occur together."""
    return not any(frozenset(pair) in _EXCLUDED for pair in itertools.combinations(values, 2))


def all_pairs() -> set[Pair]:
    """Every pair of values of two axes that can occur together."""
    return {
        frozenset(((first, a), (second, b)))
        for first, second in itertools.combinations(AXES, 2)
        for a, b in itertools.product(AXES[first], AXES[second])
        if is_possible([(first, a), (second, b)])
    }


def pairs(environment: Environment) -> set[Pair]:
    """The pairs that a run in ``environment`` tries.

    Where a login can run no command, only what this does to the error is tried.
    """
    found = map(frozenset, itertools.combinations(environment.values(), 2))
    if environment.is_usable:
        return set(found)
    return {pair for pair in found if ("startup", environment.startup) in pair}


def select(seed: int = SEED) -> list[Environment]:
    """Environments that cover :func:`all_pairs`, those with most new pairs first.

    Greedy, after Cohen et al. 1997 (AETG): of some random candidates the one with most new
    pairs.
    """
    source = random.Random(seed)
    uncovered = all_pairs()
    selected = []
    while uncovered:
        ordered = sorted(sorted(pair) for pair in uncovered)  # sets have no order of their own
        candidates = [
            _candidate(source.choice(ordered), uncovered, source) for _ in range(_CANDIDATES)
        ]
        best = max(candidates, key=lambda candidate: len(pairs(candidate) & uncovered))
        uncovered -= pairs(best)
        selected.append(best)
    return selected


def _candidate(first: Sequence[Value], uncovered: set[Pair], source: random.Random) -> Environment:
    """Begins with the pair ``first``; every other axis takes the value with most new pairs."""
    chosen = dict(first)
    for axis in source.sample(list(AXES), len(AXES)):
        if axis not in chosen:
            chosen[axis] = max(
                _possible_values(axis, chosen, source),
                key=lambda value: _gain((axis, value), chosen, uncovered),
            )
    return Environment(**chosen)


def _possible_values(axis: str, chosen: Mapping[str, str], source: random.Random) -> Iterator[str]:
    values = source.sample(AXES[axis], len(AXES[axis]))
    return (value for value in values if is_possible([*chosen.items(), (axis, value)]))


def _gain(value: Value, chosen: Mapping[str, str], uncovered: set[Pair]) -> int:
    return sum(frozenset((value, other)) in uncovered for other in chosen.items())
