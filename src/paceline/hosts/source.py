"""What the words after ``-H`` are: a keyword, a file, or the hosts themselves. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePath

from paceline.hosts.lab import lab_name
from paceline.hosts.problems import nearest
from paceline.hosts.registry import DIALECTS, ENVIRONMENTS, canonical_name
from paceline.spec.errors import HostsError

# No ending that is also a top-level domain people have machines under (.sh, .py).
_FILE_ENDINGS = frozenset(
    {".txt", ".toml", ".yaml", ".yml", ".cfg", ".conf", ".ini", ".json", ".csv", ".list", ".lst"}
    | {".hosts", ".hostfile", ".nodes", ".file", ".machines"}
)
_FILE_NAMES = frozenset(
    {"hostfile", "hosts", "hostlist", "host_file", "nodefile", "nodelist", "nodes"}
    | {"machinefile", "machines", "paceline.toml"}
)


@dataclass(frozen=True, slots=True)
class File:
    """A path, with the dialect where the user named one."""

    path: str
    dialect: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """Variables, read by this dialect; ``auto`` finds out which."""

    dialect: str


@dataclass(frozen=True, slots=True)
class Lab:
    """The lab of that name; empty for the one that is up."""

    name: str


@dataclass(frozen=True, slots=True)
class Inline:
    """The description itself."""

    text: str
    note: str = ""


Source = File | Environment | Lab | Inline


def classify(source: str, exists: bool, folder: Collection[str]) -> Source:
    """What the source is. Keywords win over files of that name (``./slurm`` is the file).

    Args:
        source: As typed.
        exists: Whether there is something at that path.
        folder: Names in the folder where a file of that name would lie.

    Raises:
        HostsError: It can only mean a file, and there is none.
    """
    if source == "auto" or canonical_name(source) in ENVIRONMENTS:
        return Environment(canonical_name(source))
    if (lab := lab_name(source)) is not None:
        return Lab(lab)
    if exists:
        return File(source)
    prefixed = _prefixed(source)
    if prefixed:
        return prefixed
    if means_file(source, folder):
        raise no_file(source, folder)
    return Inline(source, _single_note(source))


def means_file(word: str, folder: Collection[str]) -> bool:
    """Whether a word that is no existing path still cannot have been meant as hosts.

    So are paths (a slash, a leading dot or tilde), names that end like a file's, usual names
    of host files, and near misses of a file that is there.
    """
    if "/" in word or word.startswith((".", "~")):
        return True
    if set(word) & set(",[@:"):
        return False
    lowered = word.lower()
    usual = nearest(lowered, _FILE_NAMES, cutoff=0.85)
    return (
        PurePath(lowered).suffix in _FILE_ENDINGS
        or bool(usual and not _numbered(lowered))
        or _misses(word, folder) != ""
    )


def no_file(path: str, folder: Collection[str]) -> HostsError:
    """The error for a path that does not exist, offering the nearest names."""
    guess = nearest(PurePath(path).name, folder)
    offer = f"did you mean `{PurePath(path).parent / guess}`? " if guess else ""
    hosts = f"If a host is called that, write `{path},`" if "/" not in path else ""
    return HostsError(
        f"there is no host file `{path}`",
        found="no file of that name here" if "/" not in path else "nothing at that path",
        remedy=(offer + hosts).strip() or "give the path of a host file, or a list such as n1,n2",
    )


def _prefixed(source: str) -> File | None:
    """``accelerate:FILE``, unless the word is a host with a number such as ``slurm:4``."""
    prefix, colon, path = source.partition(":")
    dialect = canonical_name(prefix)
    if not colon or not path or path.isdigit() or dialect not in DIALECTS:
        return None
    return File(path, dialect)


def _misses(word: str, folder: Collection[str]) -> str:
    guess = nearest(word, folder, cutoff=0.85)
    digits = str.maketrans("", "", "0123456789")
    return guess if guess and guess.translate(digits) != word.translate(digits) else ""


def _numbered(word: str) -> bool:
    return any(char.isdigit() for char in word)


def _single_note(source: str) -> str:
    if set(source) & set(",[@:"):
        return ""
    return f"`{source}` was read as one host: there is no file of that name"
