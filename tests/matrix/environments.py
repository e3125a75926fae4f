"""Defines the axes on which sites differ, and selects environments that cover all pairs of values.

This module has no side effects; ``sites.py`` gives the values their meaning.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

SEED = 3


@dataclass(frozen=True)
class Environment:
    """One environment: a value for each axis.

    Attributes:
        home: A home for each host, one for all hosts, or one for all hosts at another path on the
            second host.
        project: The hosts see the launcher's folder, or its code is sent.
        tmp: ``/tmp`` of each host: its own, one for all hosts, or mounted noexec.
        cache: Place of ``XDG_CACHE_HOME``: below the home (unset), or in ``/tmp``.
        user: The user who logs in: root, one ordinary user, or another user on each host.
        umask: Umask of logins and of the launcher.
        shell: The login shell.
        startup: What the login shell's start-up file does. ``execs`` passes the command to another
            shell; ``exits`` ends the shell, or replaces it by one that never gets the command.
        python: The second host's interpreter is at the same path or at a different one.
        network: ``mixed``: IPv6 on all hosts, and IPv4 on the first host only.
        names: What host names resolve to on the hosts: addresses; 127.0.1.1 for the own name, as in
            Debian; a dead interface, and for other hosts an unused address; nothing.
        shm: Size of the hosts' ``/dev/shm``: the usual one, or 64 KiB.
        quota: Size of the home: that of the disk, or 96 MiB (a small file system: a quota gives
            another error number at the same moment).
        cpus: CPUs that a login may use: all, or one.
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
        """Returns whether a login can run commands; if not, a clear error is expected."""
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
    """Returns whether these values can occur together."""
    return not any(frozenset(pair) in _EXCLUDED for pair in itertools.combinations(values, 2))


def all_pairs() -> set[Pair]:
    """Returns every pair of values of two axes that can occur together."""
    return {
        frozenset(((first, a), (second, b)))
        for first, second in itertools.combinations(AXES, 2)
        for a, b in itertools.product(AXES[first], AXES[second])
        if is_possible([(first, a), (second, b)])
    }


def pairs(environment: Environment) -> set[Pair]:
    """Returns the pairs that a run in ``environment`` tests.

    If a login can run no command, only pairs with the start-up file's value are tested.
    """
    found = map(frozenset, itertools.combinations(environment.values(), 2))
    if environment.is_usable:
        return set(found)
    return {pair for pair in found if ("startup", environment.startup) in pair}


def select(seed: int = SEED) -> list[Environment]:
    """Selects environments that cover :func:`all_pairs`, those with most new pairs first.

    Greedy, after Cohen et al. 1997 (AETG): takes the one of some random candidates that has most
    new pairs.
    """
    source = random.Random(seed)
    uncovered = all_pairs()
    selected = []
    while uncovered:
        ordered = sorted(sorted(pair) for pair in uncovered)  # sorted: sets have no fixed order
        candidates = [
            _candidate(source.choice(ordered), uncovered, source) for _ in range(_CANDIDATES)
        ]
        best = max(candidates, key=lambda candidate: len(pairs(candidate) & uncovered))
        uncovered -= pairs(best)
        selected.append(best)
    return selected


def _candidate(first: Sequence[Value], uncovered: set[Pair], source: random.Random) -> Environment:
    """Returns an environment with a given pair; other axes take the value with most new pairs."""
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
