"""What the words after ``-H`` are, a keyword, a file or the hosts themselves, and which cluster.

Deciding what they are is pure; reading a cluster looks at the machine, here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from paceline.hosts.dialect import COLON_MEANINGS, LIST_LABEL, Colon, Dialect, Parsed, Reading
from paceline.hosts.dialects import (
    ALLOCATIONS,
    DIALECTS,
    ENVIRONMENTS,
    TYPED,
    canonical_name,
)
from paceline.hosts.files import read_text, with_includes
from paceline.hosts.lab import find_lab, lab_name
from paceline.hosts.tables import apply_overrides
from paceline.spec.errors import HostsError, SettingError
from paceline.spec.helptext import did_you_mean, nearest
from paceline.spec.hosts import Cluster, Host

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
    if set(word) & set(",;[@:"):
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
    if set(source) & set(",;[@:"):
        return ""
    return f"`{source}` was read as one host: there is no file of that name"


# --- from what was typed to a cluster


@dataclass(frozen=True, slots=True)
class _Context:
    environ: Mapping[str, str]
    cwd: Path
    colon: Colon | None
    dialect: Dialect | None  # forced by the user


def read_hosts(
    source: str | None,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    colon: str | None = None,
    dialect: str | None = None,
) -> Cluster:
    """The hosts that a description names, in rank order.

    Args:
        source: A file; a list (``n1,n2:4``, ``node[01-04]``); ``slurm``, ``pbs``, ``mpi``,
            ``torchrun``, ``kubernetes`` or ``auto`` for the environment's; ``DIALECT:FILE``;
            ``local`` or ``None`` for this machine alone.
        environ: Environment variables.
        cwd: Folder to which relative paths belong.
        colon: What ``host:n`` means, against the rule: ``slots``, ``port``, ``rendezvous``.
        dialect: Name of the dialect, against detection.

    Raises:
        HostsError: The description is missing or wrong; says file, line and what was expected.
        SettingError: There is no such dialect or meaning of the colon.
    """
    context = _Context(environ, cwd, _colon(colon), _dialect(dialect))
    if source is None and context.dialect and context.dialect.environment:
        return _environment(context.dialect.name, context)
    if source is None or source == "local":
        return local_cluster(environ)
    if not source.strip():
        raise _empty("an empty name of hosts")
    return _described(source.strip(), context)


def local_cluster(environ: Mapping[str, str]) -> Cluster:
    """This machine alone. An allocation's variables are pointed out, never taken silently."""
    present = [name for name in ALLOCATIONS if DIALECTS[name].detect(Reading(environ=environ))]
    notes = [f"this is inside a {n.title()} job; `-H {n}` takes its hosts" for n in present]
    return Cluster((Host(here(), local=True),), "this machine", tuple(notes))


def load_toml(path: Path) -> Mapping[str, Any]:
    """The document of a paceline.toml; empty when there is no such file. Raises HostsError.

    Its ``[hosts.NAME]`` tables are checked, so that errors in them have a line number.
    """
    from paceline.hosts.dialects import toml_tables
    from paceline.hosts.tables import BadTableError, host_tables

    if not path.exists():
        return {}
    if not path.is_file():  # a pipe would be waited for
        raise HostsError(f"{path} is not a file", remedy=f"look at it: ls -ld {path}")
    text = read_text(path, str(path))
    document = toml_tables.parse_document(text, path.name)
    try:
        host_tables(document)
    except BadTableError as problem:
        raise toml_tables.located(problem, text, path.name) from None
    return document


def here() -> str:
    """This machine's name without its domain."""
    return os.uname().nodename.split(".")[0] or "localhost"


def _described(source: str, context: _Context) -> Cluster:
    path = _path(source, context.cwd)
    exists = _exists(path)
    if context.dialect and not context.dialect.environment and not exists:
        return _inline(Inline(source), context)
    match classify(source, exists, _names_beside(path)):
        case File(name, dialect):
            return _file(name, dialect, context.cwd, context)
        case Environment(name):
            return _environment(name, context)
        case Lab(name):
            return _lab(name, context)
        case Inline() as inline:
            return _inline(inline, context)


def _path(name: str, folder: Path) -> Path:
    """Where a file of that name would lie; an unknown user's home is part of a name."""
    try:
        return folder / Path(name).expanduser()
    except (RuntimeError, ValueError):  # ValueError: a NUL, half a surrogate
        return folder / name


def _exists(path: Path) -> bool:
    """Whether something is there; what can be no path is not there."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, no rights, a NUL
        return False


def _inline(inline: Inline, context: _Context) -> Cluster:
    reading = _reading(context, inline.text, LIST_LABEL, context.dialect)
    dialect = context.dialect or _typed(reading)
    notes = (inline.note,) if inline.note else ()
    return _cluster(dialect.parse(reading), f"{inline.text} ({dialect.title})", notes)


def _file(name: str, dialect: str | None, folder: Path, context: _Context) -> Cluster:
    path = _path(name, folder)
    if not _exists(path):
        raise no_file(name, _names_beside(path))
    text = read_text(path, name)
    forced = context.dialect or (DIALECTS[dialect] if dialect else None)
    reading = _reading(context, text, name, forced)
    chosen = forced or _detected(reading)
    if chosen.name == "ssh-config":
        reading = _reading(context, with_includes(text, path.parent), name, forced)
    parsed = chosen.parse(reading) if text.strip() else Parsed()
    return _followed(parsed, f"{name} ({chosen.title})", path.parent, context)


def _lab(name: str, context: _Context) -> Cluster:
    """The hosts of a lab, each with its own interpreter where the lab was told one."""
    found = find_lab(name, context.environ)
    hosts = _file(str(found.hostfile), "plain", context.cwd, context)
    source = f"lab {found.root.name!r}"
    return apply_overrides(replace(hosts, source=source), load_toml(found.settings))


def _environment(name: str, context: _Context) -> Cluster:
    reading = Reading(environ=context.environ, here=here(), colon=context.colon)
    if name == "auto":
        found = [n for n in ENVIRONMENTS if DIALECTS[n].detect(reading)]
        if not found:
            return local_cluster(context.environ)
        name = found[0]
    dialect = DIALECTS[name]
    return _followed(dialect.parse(reading), dialect.title, context.cwd, context)


def _followed(parsed: Parsed, source: str, folder: Path, context: _Context) -> Cluster:
    if parsed.follow is None:
        return _cluster(parsed, source)
    onward = _Context(context.environ, context.cwd, context.colon, None)
    where = folder if _exists(folder / parsed.follow.path) else context.cwd
    if not _exists(_path(parsed.follow.path, where)):
        raise HostsError(
            f"{source} names the host file {parsed.follow.path}, which does not exist",
            found=f"neither in {folder} nor in {context.cwd}",
            remedy="correct its path there, or name the hosts here: -H FILE or -H n1,n2",
        )
    cluster = _file(parsed.follow.path, parsed.follow.dialect, where, onward)
    return Cluster(cluster.hosts, f"{source} → {cluster.source}", parsed.notes + cluster.notes)


def _cluster(parsed: Parsed, source: str, notes: tuple[str, ...] = ()) -> Cluster:
    if not parsed.hosts:
        raise _empty(source)
    return Cluster(parsed.hosts, source, notes + parsed.notes)


def _reading(context: _Context, text: str, label: str, forced: Dialect | None) -> Reading:
    colon = context.colon or (forced.colon if forced else None)
    return Reading(text=text, label=label, colon=colon, environ=context.environ, here=here())


def _detected(reading: Reading) -> Dialect:
    fits = (name for name in DIALECTS if DIALECTS[name].detect(reading))
    return DIALECTS[next(fits, "plain")]


def _typed(reading: Reading) -> Dialect:
    """A list typed on the command line is a comma list or a node list; a colon has its rule."""
    fits = (name for name in TYPED if DIALECTS[name].detect(reading))
    return DIALECTS[next(fits, TYPED[-1])]


def _names_beside(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    except (OSError, ValueError):
        return []


def _colon(text: str | None) -> Colon | None:
    for meaning in COLON_MEANINGS:
        if text == meaning:
            return meaning
    if text is None:
        return None
    raise SettingError(
        "`--colon` says what the number in `host:n` means",
        found=text,
        remedy=f"one of {', '.join(COLON_MEANINGS)}",
    )


def _dialect(name: str | None) -> Dialect | None:
    if name is None:
        return None
    dialect = DIALECTS.get(canonical_name(name))
    if dialect is None:
        raise SettingError(
            f"there is no dialect `{name}`",
            found="`--dialect` names how hosts are written down",
            remedy=did_you_mean(name, list(DIALECTS)),
        )
    return dialect


def _empty(source: str) -> HostsError:
    return HostsError(
        f"{source}: no hosts in it",
        found="only blank lines and comments, if anything",
        remedy="one host a line: `[user@]host[:n] [slots=n]`; see `paceline hosts --help`",
    )
