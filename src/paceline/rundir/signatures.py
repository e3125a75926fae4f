"""Signs the manifests of a run's checkpoints, and finds those that were changed later.

A signature is an HMAC under a key that only this user of this machine can read. It is valid in the
run directory where it was made. The launcher signs a checkpoint when it arrives. Ranks write a
state again that turns out to be the best. But a host could also replace a checkpoint: another one
of the same name is signed only as long as no later one is. A host could as well write a later one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.agent.files import safe_paths
from paceline.rundir import records
from paceline.rundir.detached_file import LineSeals
from paceline.spec.errors import SettingError
from paceline.spec.formatting import format_size, shell_text
from paceline.spec.rundir import (
    CHECKPOINTS,
    MANIFEST,
    SIGNATURES,
    Version,
    checkpoints,
    parse_version,
)
from paceline.spec.training.checkpoint_manifest import DamagedCheckpoint, Manifest, parse_manifest

MAX_BYTES = 16 << 20  # of the signatures of a run


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint that was compared with its manifest, its predecessor and its signature.

    Attributes:
        problem: How it differs from what was written; empty if it does not.
        is_signed: Whether you signed its manifest as it is.
        is_missing: Whether its folder is gone.
    """

    name: str
    manifest: Manifest | None
    problem: str
    is_signed: bool
    is_missing: bool = False

    @property
    def status(self) -> str:
        if self.is_missing:
            return "missing"
        if self.problem:
            return "changed"
        return "signed" if self.is_signed else "unsigned"


class Signer:
    """Signs the checkpoints of a run that this process receives.

    Attributes:
        newest: The newest one that it has signed; only this one may be replaced.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self.newest = ""

    def sign(self, name: str) -> None:
        """Signs a checkpoint that has just been made, unless it replaces one that may not be.

        Without a key, or on a full disk, it does nothing. Nor if the signatures cannot be read.

        ``name``: of the checkpoint's folder.
        """
        seals = LineSeals(self._run)
        with contextlib.suppress(OSError, DamagedCheckpoint, SettingError):
            raw = _read_manifest(self._run / CHECKPOINTS / name)
            parse_manifest(raw)
            former = _signatures(self._run, seals).get(name)
            digest = hashlib.sha256(raw).hexdigest()
            if former not in (None, digest) and name != self.newest:
                return
            if former != digest:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                fd = safe_paths.open_file(str(self._run), SIGNATURES, flags)
                with os.fdopen(fd, "wb") as file:
                    file.write(b"\n" + _encode(seals, name, digest))  # the last may be cut off
            self.newest = max(self.newest, name, key=_version)

    def sign_step(self, step: int | None) -> None:
        """Signs the newest checkpoint of a step; ``None``: of any."""
        for path in checkpoints(self._run):
            version = parse_version(path.name)
            if version is not None and step in (None, version[1]):
                self.sign(path.name)
                return

    def may_arrive(self, name: str, manifest: Manifest) -> bool:
        """Whether a checkpoint may be fetched: it replaces no other that was signed before."""
        try:
            former = _signatures(self._run, LineSeals(self._run)).get(name)
        except SettingError:
            return False
        digest = hashlib.sha256(manifest.encode()).hexdigest()
        return former in (None, digest) or name == self.newest


def _version(name: str) -> Version:
    return parse_version(name) or (-1, -1)


def verify(run: Path) -> Iterator[VerifiedCheckpoint]:
    """Compares each checkpoint of a run directory with what was written, newest first.

    Runs remove older checkpoints, but never the newest: only that one can be missing.
    SettingError if the signatures cannot be read.
    """
    signed = _signatures(run, LineSeals(run))
    signed_paths = [run / CHECKPOINTS / name for name in signed]
    paths = {*checkpoints(run), *filter(os.path.lexists, signed_paths)}
    newest = max((path.name for path in (*paths, *signed_paths)), key=_version, default="")
    if newest:
        paths.add(run / CHECKPOINTS / newest)
    for path in sorted(paths, key=lambda path: _version(path.name), reverse=True):
        manifest, problem, is_signed = None, "", False
        try:
            if not os.path.lexists(path):
                problem = "you signed it, and its folder is gone"
                yield VerifiedCheckpoint(path.name, None, problem, False, is_missing=True)
                continue
            if links := [link for link in (path.parent, path) if link.is_symlink()]:
                raise DamagedCheckpoint(f"{links[0].name} is a link")
            raw = _read_manifest(path)
            is_signed = _is_signed(signed.get(path.name), raw)
            manifest = parse_manifest(raw)
            manifest.verify(path)
            problem = _foreign_file(path, manifest) or _chain_problem(run, manifest)
        except DamagedCheckpoint as damage:
            problem = str(damage)
        except OSError as error:
            problem = f"{MANIFEST} cannot be read: {error.strerror}"
        if not problem and path.name in signed and not is_signed:
            problem = "its manifest was replaced after you signed it"
        yield VerifiedCheckpoint(path.name, manifest, problem, is_signed)


def require_unchanged(run: Path) -> None:
    """Raises SettingError if an intact manifest differs from the one that was signed.

    Ranks skip damaged checkpoints by themselves; this one looks intact to them.
    """
    signed = _signatures(run, LineSeals(run))
    for path in checkpoints(run) if signed else ():
        with contextlib.suppress(OSError, DamagedCheckpoint):
            raw = _read_manifest(path)
            parse_manifest(raw)
            if path.name in signed and not _is_signed(signed[path.name], raw):
                raise SettingError(
                    f"checkpoint {path.name} was replaced after it was written",
                    found=f"{path / MANIFEST} is not the file that you signed",
                    remedy="See what else has changed: "
                    + shell_text(["paceline", "verify", str(run)])
                    + "\nTo start from another checkpoint, remove this one: "
                    + shell_text(["rm", "-r", str(path)]),
                )


def forget_removed(run: Path) -> str:
    """Removes the signatures of checkpoints that are gone: a new one may get such a name.

    Returns a note if the newest one is gone: no run removes it, but you may have done so.
    """
    seals = LineSeals(run)
    signed, present = _signatures(run, seals), [path.name for path in checkpoints(run)]
    if not signed.keys() <= set(present):
        lines = [_encode(seals, name, signed[name]) for name in signed if name in present]
        with contextlib.suppress(OSError):
            safe_paths.write_file(str(run), SIGNATURES, b"".join(lines))
    newest = max(signed, key=_version, default="")
    if _version(newest) <= max(map(_version, present), default=_version("")):
        return ""
    remaining = f"the newest complete one is {present[0]}" if present else "no other is complete"
    return f"checkpoint {newest}, which you signed, is missing or has no manifest; {remaining}"


def _encode(seals: LineSeals, name: str, digest: str) -> bytes:
    line = seals.sealed({"checkpoint": name, "manifest": digest})
    return json.dumps(line).encode() + b"\n"


def _is_signed(signed: str | None, raw: bytes) -> bool:
    return signed == hashlib.sha256(raw).hexdigest()


def _foreign_file(checkpoint: Path, manifest: Manifest) -> str:
    """Names a file that the manifest does not, or a link: its target can change at any time."""
    for folder, folders, names in safe_paths.walk(str(checkpoint)):
        prefix = f"{folder}/" if folder else ""
        for path in (prefix + name for name in (*folders, *names)):
            if (checkpoint / path).is_symlink():
                return f"{path!r:.100} is a link"
        for name in (prefix + name for name in names):
            is_known = name == MANIFEST or name in manifest.files
            if not is_known and not Path(name).name.startswith(".nfs"):  # NFS: still open somewhere
                return f"{name!r:.100} is not in its manifest"
    return ""


def _read_manifest(checkpoint: Path) -> bytes:
    with records.open_regular(checkpoint / MANIFEST) as stream:
        return stream.read(records.MAX_OBJECT_BYTES)


def _chain_problem(run: Path, manifest: Manifest) -> str:
    """Compares a checkpoint's predecessor with the one here; it may have been removed."""
    previous = manifest.info.get("previous")
    if not isinstance(previous, dict):
        return ""  # the first one, or of an earlier version
    name = str(previous.get("checkpoint"))
    if parse_version(name) is None:
        return "it names no checkpoint as its predecessor"
    with contextlib.suppress(OSError):
        raw = _read_manifest(run / CHECKPOINTS / name)
        if hashlib.sha256(raw).hexdigest() != previous.get("sha256"):
            return f"its predecessor {name} was replaced"
    return ""


def _signatures(run: Path, seals: LineSeals) -> Mapping[str, str]:
    """SHA-256 of the manifest that was signed last for each checkpoint, by name.

    Raises SettingError for a file that cannot be read: it does not mean that nothing was signed.
    """
    path = run / SIGNATURES
    try:
        with records.open_regular(path) as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from None
    if len(content) > MAX_BYTES:
        raise _unreadable(path, f"it has more than {format_size(MAX_BYTES)}")
    signed: dict[str, str] = {}
    for text in content.split(b"\n"):
        line: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
        if isinstance(line, dict) and seals.is_valid(line):
            signed[str(line.get("checkpoint"))] = str(line.get("manifest"))
    return signed


def _unreadable(path: Path, reason: str) -> SettingError:
    return SettingError(
        f"the signatures of checkpoints in {path} cannot be read",
        found=reason,
        remedy="If you trust the checkpoints, remove the file; they then count as unsigned: "
        + shell_text(["rm", str(path)]),
    )
