"""Reads a cluster from what is given to ``-H``: a keyword, a file or the hosts themselves."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from paceline.agent.files.planted import is_planted
from paceline.hosts.dialect import (
    COLON_MEANINGS,
    LIST_LABEL,
    ColonMeaning,
    Dialect,
    Parsed,
    Reading,
)
from paceline.hosts.dialects import (
    ALLOCATIONS,
    COMMAND_LINE_DIALECTS,
    DIALECTS,
    ENVIRONMENTS,
    canonical_name,
)
from paceline.hosts.files import read_text, with_includes
from paceline.hosts.lab import find_lab, lab_name
from paceline.hosts.tables import apply_overrides
from paceline.spec.errors import HostsError, SettingError
from paceline.spec.formatting import closest_match, suggest
from paceline.spec.hosts import Cluster, Host

# No ending that is also a common top-level domain (.sh, .py).
_FILE_ENDINGS = frozenset(
    {".txt", ".toml", ".yaml", ".yml", ".cfg", ".conf", ".ini", ".json", ".csv", ".list", ".lst"}
    | {".hosts", ".hostfile", ".nodes", ".file", ".machines"}
)
_FILE_NAMES = frozenset(
    {"hostfile", "hosts", "hostlist", "host_file", "nodefile", "nodelist", "nodes"}
    | {"machinefile", "machines", "paceline.toml"}
)


def must_be_file(text: str, folder: Collection[str]) -> bool:
    """Whether a text that is no existing path can still only mean a file.

    True for paths (a slash, a leading dot or tilde), endings of files, common names of host files,
    and misspelt names of existing files.
    """
    if "/" in text or text.startswith((".", "~")):
        return True
    if set(text) & set(",;[@:"):
        return False
    name = text.lower()
    known_name = closest_match(name, _FILE_NAMES, cutoff=0.85)
    return (
        PurePath(name).suffix in _FILE_ENDINGS
        or bool(known_name and not any(char.isdigit() for char in name))
        or _near_miss(text, folder) != ""
    )


def missing_file_error(path: str, folder: Collection[str]) -> HostsError:
    """Returns the error for a path that does not exist; suggests the nearest name."""
    guess = closest_match(PurePath(path).name, folder)
    suggestion = f"did you mean `{PurePath(path).parent / guess}`? " if guess else ""
    found, hint = "nothing at that path", ""
    if "/" not in path:
        found, hint = "no file of that name here", f"If a host is called that, write `{path},`"
    remedy = f"{suggestion}{hint}".strip()
    return HostsError(
        f"there is no host file `{path}`",
        found=found,
        remedy=remedy or "give the path of a host file, or a list such as n1,n2",
    )


def _near_miss(name: str, folder: Collection[str]) -> str:
    guess = closest_match(name, folder, cutoff=0.85)
    digits = str.maketrans("", "", "0123456789")
    return guess if guess and guess.translate(digits) != name.translate(digits) else ""


# --- from what was typed to a cluster


@dataclass(frozen=True, slots=True)
class _Context:
    environ: Mapping[str, str]
    cwd: Path
    colon: ColonMeaning | None
    dialect: Dialect | None  # forced by the user


def read_hosts(
    source: str | None,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    colon: str | None = None,
    dialect: str | None = None,
) -> Cluster:
    """Reads the hosts of a description, in rank order.

    Args:
        source: A file; a list (``n1,n2:4``, ``node[01-04]``); ``slurm``, ``pbs``, ``mpi``,
            ``torchrun``, ``kubernetes`` or ``auto`` to read variables; ``DIALECT:FILE``;
            ``local`` or ``None`` for this machine alone.
        environ: Environment variables.
        cwd: Folder that relative paths belong to.
        colon: Meaning of ``host:n``, ``slots``, ``port`` or ``rendezvous``; ``None`` for the rule.
        dialect: Name of the dialect; ``None`` detects it.

    Raises:
        HostsError: The description is missing or wrong; names file, line and valid input.
        SettingError: There is no such dialect or meaning of the colon.
    """
    context = _Context(environ, cwd, _colon(colon), _dialect(dialect))
    if source is None and context.dialect and context.dialect.is_environment:
        return _read_environment(context.dialect.name, context)
    if source is None or source == "local":
        return local_cluster(environ)
    if not source.strip():
        raise _no_hosts_error("an empty name of hosts")
    return _read_source(source.strip(), context)


def local_cluster(environ: Mapping[str, str]) -> Cluster:
    """Returns this machine alone; a note points out an allocation's variables."""
    present = [name for name in ALLOCATIONS if DIALECTS[name].detect(Reading(environ=environ))]
    notes = [f"this is inside a {n.title()} job; `-H {n}` takes its hosts" for n in present]
    return Cluster((Host(local_hostname(), local=True),), "this machine", tuple(notes))


def load_toml(path: Path) -> Mapping[str, Any]:
    """Reads a paceline.toml; empty if there is no such file. Raises HostsError.

    Its ``[hosts.NAME]`` tables are checked here, so that errors have a line number.
    """
    from paceline.hosts.dialects import toml_tables
    from paceline.hosts.tables import TableError, host_tables

    if not os.path.lexists(path):
        return {}
    if not path.is_file():  # reading a pipe would block
        raise HostsError(f"{path} is not a file", remedy=f"look at it: ls -ld {path}")
    text = read_text(path, str(path))
    document = toml_tables.parse_document(text, path.name)
    try:
        host_tables(document)
    except TableError as problem:
        raise toml_tables.located(problem, text, path.name) from None
    return document


def local_hostname() -> str:
    """Returns this machine's name without its domain."""
    return os.uname().nodename.split(".")[0] or "localhost"


def _read_source(source: str, context: _Context) -> Cluster:
    """Reads a source. Keywords win over files of that name (``./slurm`` is the file)."""
    path = _path(source, context.cwd)
    exists = _exists(path)
    if context.dialect and not context.dialect.is_environment and not exists:
        return _read_list(source, context)
    name = canonical_name(source)
    if name == "auto" or name in ENVIRONMENTS:
        return _read_environment(name, context)
    if (lab := lab_name(source)) is not None:
        return _read_lab(lab, context)
    if exists:
        if "/" not in source and is_planted(str(path)):
            raise HostsError(
                f"{source} is a file of another user, in a folder where everybody may make files",
                found=str(path),
                remedy=f"write ./{source} for the file, or {source}, for a host of that name",
            )
        return _read_file(source, None, context.cwd, context)
    prefix, _, file = source.partition(":")
    if file and not file.isdigit() and canonical_name(prefix) in DIALECTS:  # `slurm:4` is a host
        return _read_file(file, canonical_name(prefix), context.cwd, context)
    siblings = _sibling_files(path)
    if must_be_file(source, siblings):
        raise missing_file_error(source, siblings)
    note = f"`{source}` was read as one host: there is no file of that name"
    return _read_list(source, context, () if set(source) & set(",;[@:") else (note,))


def _path(name: str, folder: Path) -> Path:
    """Returns the path of a file of that name; ``~`` of an unknown user is part of the name."""
    try:
        return folder / Path(name).expanduser()
    except (RuntimeError, ValueError):  # ValueError: a NUL, half a surrogate
        return folder / name


def _exists(path: Path) -> bool:
    """Whether the path exists; False for invalid paths."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, no rights, a NUL
        return False


def _read_list(text: str, context: _Context, notes: tuple[str, ...] = ()) -> Cluster:
    reading = _reading(context, text, LIST_LABEL, context.dialect)
    dialect = context.dialect or _detect(reading, COMMAND_LINE_DIALECTS, "list")
    return _cluster(dialect.parse(reading), f"{text} ({dialect.title})", notes)


def _read_file(name: str, dialect: str | None, folder: Path, context: _Context) -> Cluster:
    path = _path(name, folder)
    if not _exists(path):
        raise missing_file_error(name, _sibling_files(path))
    text = read_text(path, name)
    forced = context.dialect or (DIALECTS[dialect] if dialect else None)
    reading = _reading(context, text, name, forced)
    selected = forced or _detect(reading, DIALECTS, "plain")
    includes: list[Path] = []
    if selected.name == "ssh-config":
        expanded, includes = with_includes(text, path.parent)
        reading = _reading(context, expanded, name, forced)
    parsed = selected.parse(reading) if text.strip() else Parsed()
    cluster = _resolve_reference(parsed, f"{name} ({selected.title})", path.parent, context)
    if parsed.reference is not None or path.is_fifo():
        return cluster
    resolved = tuple(str(include.resolve()) for include in includes)
    return replace(cluster, file=str(path.resolve()), includes=resolved)


def _read_lab(name: str, context: _Context) -> Cluster:
    """Reads the hosts of a lab, with their own interpreters if the lab has them."""
    layout = find_lab(name, context.environ)
    hosts = _read_file(str(layout.hostfile), "plain", context.cwd, context)
    source = f"lab {layout.root.name!r}"
    return apply_overrides(replace(hosts, source=source), load_toml(layout.settings))


def _read_environment(name: str, context: _Context) -> Cluster:
    reading = Reading(environ=context.environ, hostname=local_hostname(), colon=context.colon)
    if name == "auto":
        matches = [n for n in ENVIRONMENTS if DIALECTS[n].detect(reading)]
        if not matches:
            return local_cluster(context.environ)
        name = matches[0]
    dialect = DIALECTS[name]
    return _resolve_reference(dialect.parse(reading), dialect.title, context.cwd, context)


def _resolve_reference(parsed: Parsed, source: str, folder: Path, context: _Context) -> Cluster:
    if parsed.reference is None:
        return _cluster(parsed, source)
    inner_context = replace(context, dialect=None)
    base = folder if _exists(folder / parsed.reference.path) else context.cwd
    if not _exists(_path(parsed.reference.path, base)):
        raise HostsError(
            f"{source} names the host file {parsed.reference.path}, which does not exist",
            found=f"neither in {folder} nor in {context.cwd}",
            remedy="correct its path there, or name the hosts here: -H FILE or -H n1,n2",
        )
    cluster = _read_file(parsed.reference.path, parsed.reference.dialect, base, inner_context)
    source = f"{source} → {cluster.source}"
    return replace(cluster, source=source, notes=parsed.notes + cluster.notes)


def _cluster(parsed: Parsed, source: str, notes: tuple[str, ...] = ()) -> Cluster:
    if not parsed.hosts:
        raise _no_hosts_error(source)
    return Cluster(parsed.hosts, source, notes + parsed.notes)


def _reading(context: _Context, text: str, label: str, forced: Dialect | None) -> Reading:
    colon = context.colon or (forced.colon if forced else None)
    return Reading(text, label, colon, context.environ, local_hostname())


def _detect(reading: Reading, names: Iterable[str], default: str) -> Dialect:
    matches = (name for name in names if DIALECTS[name].detect(reading))
    return DIALECTS[next(matches, default)]


def _sibling_files(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    except (OSError, ValueError):
        return []


def _colon(text: str | None) -> ColonMeaning | None:
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
            remedy=suggest(name, list(DIALECTS)),
        )
    return dialect


def _no_hosts_error(source: str) -> HostsError:
    return HostsError(
        f"{source}: no hosts in it",
        found="only blank lines and comments, if anything",
        remedy="one host a line: `[user@]host[:n] [slots=n]`; see `paceline hosts --help`",
    )
