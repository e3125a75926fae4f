"""Signs the manifests of a run's checkpoints, and finds those that were changed later.

A signature is an HMAC under a key that only this user of this machine can read. It is valid in the
run directory where it was made. The launcher signs a checkpoint when it arrives. Ranks write a
state again that turns out to be the best. But a host could also replace a checkpoint: another one
of the same name is signed only as long as no later one is. A host could as well write a later one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.agent.files import safe_paths
from paceline.rundir import records
from paceline.rundir.signature_file import SignatureFile
from paceline.spec.errors import SettingError
from paceline.spec.formatting import shell_text
from paceline.spec.rundir import CHECKPOINTS, MANIFEST, Version, checkpoints, parse_version
from paceline.spec.training.checkpoint_manifest import DamagedCheckpoint, Manifest, parse_manifest


@dataclass(frozen=True, slots=True)
class VerifiedItem:
    """A checkpoint, or the final model, that was compared with its hashes and its signature.

    Attributes:
        problem: How it differs from what was written; empty if it does not.
        is_signed: Whether you signed its hashes as they are.
        is_missing: Whether its folder is gone.
        is_unexpected: Whether it is unsigned, although an earlier one is signed.
        uncovered: Files of it that may have any content.
    """

    name: str
    manifest: Manifest | None
    problem: str
    is_signed: bool
    is_missing: bool = False
    is_unexpected: bool = False
    uncovered: Sequence[str] = ()

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
        file = SignatureFile(self._run)
        with contextlib.suppress(OSError, DamagedCheckpoint, SettingError):
            raw = _read_manifest(self._run / CHECKPOINTS / name)
            parse_manifest(raw, name)
            signatures = file.read()
            former = signatures.manifests.get(name)
            digest = hashlib.sha256(raw).hexdigest()
            if former not in (None, digest) and name != self.newest:
                return
            if signatures.problem and _version(name) < _version(self.newest):
                return  # the line of another manifest may have been removed
            if former != digest:
                file.append_manifest(name, digest, signatures.seal)
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
            former = SignatureFile(self._run).read().manifests.get(name)
        except SettingError:
            return False
        digest = hashlib.sha256(manifest.encode()).hexdigest()
        return former in (None, digest) or name == self.newest


def _version(name: str) -> Version:
    return parse_version(name) or (-1, -1)


def verify(run: Path) -> Iterator[VerifiedItem]:
    """Compares each checkpoint of a run directory with what was written, newest first.

    Runs remove older checkpoints, but never the newest: only that one can be missing.
    SettingError if the signatures cannot be read.
    """
    signed = SignatureFile(run).read().manifests
    unexpected = _unexpected([path.name for path in checkpoints(run)], signed)
    signed_paths = [run / CHECKPOINTS / name for name in signed]
    paths = {*checkpoints(run), *filter(os.path.lexists, signed_paths)}
    newest = max((path.name for path in (*paths, *signed_paths)), key=_version, default="")
    if newest:
        paths.add(run / CHECKPOINTS / newest)
    for path in sorted(paths, key=lambda path: _version(path.name), reverse=True):
        manifest, problem, is_signed, uncovered = None, "", False, list[str]()
        try:
            if not os.path.lexists(path):
                problem = "you signed it, and its folder is gone"
                yield VerifiedItem(path.name, None, problem, False, is_missing=True)
                continue
            if links := [link for link in (path.parent, path) if link.is_symlink()]:
                raise DamagedCheckpoint(f"{links[0].name} is a link")
            raw = _read_manifest(path)
            is_signed = _is_signed(signed.get(path.name), raw)
            manifest = parse_manifest(raw, path.name)
            manifest.verify(path)
            uncovered = _uncovered_files(path, manifest)
            problem = _chain_problem(run, manifest)
        except DamagedCheckpoint as damage:
            problem = str(damage)
        except OSError as error:
            problem = f"{MANIFEST} cannot be read: {error.strerror}"
        if not problem and path.name in signed and not is_signed:
            problem = "its manifest was replaced after you signed it"
        yield VerifiedItem(
            path.name,
            manifest,
            problem,
            is_signed,
            is_unexpected=not problem and path.name in unexpected,
            uncovered=uncovered,
        )


def require_unchanged(run: Path) -> None:
    """Raises SettingError if an intact manifest differs from the one that was signed.

    Ranks skip damaged checkpoints by themselves; this one looks intact to them.
    """
    signed = SignatureFile(run).read().manifests
    for path in checkpoints(run) if signed else ():
        with contextlib.suppress(OSError, DamagedCheckpoint):
            raw = _read_manifest(path)
            parse_manifest(raw, path.name)
            if path.name in signed and not _is_signed(signed[path.name], raw):
                raise SettingError(
                    f"checkpoint {path.name} was replaced after it was written",
                    found=f"{path / MANIFEST} is not the file that you signed",
                    remedy="See what else has changed: "
                    + shell_text(["paceline", "verify", str(run)])
                    + "\nTo start from another checkpoint, remove this one: "
                    + shell_text(["rm", "-r", str(path)]),
                )


def forget_removed(run: Path) -> list[str]:
    """Removes the signatures of checkpoints that are gone: a new one may get such a name.

    Returns notes about checkpoints and signatures that nobody but you should have changed.
    """
    file = SignatureFile(run)
    signatures, present = file.read(), [path.name for path in checkpoints(run)]
    signed, problem = signatures.manifests, signatures.problem
    if not present and not os.path.lexists(file.path):
        file.remove_record()  # you have removed an earlier run
        return []
    if problem or not signed.keys() <= set(present):
        lines = {name: digest for name, digest in signed.items() if name in present}
        with contextlib.suppress(OSError):
            file.rewrite(lines, signatures.model, problem)
    elif not signatures.is_recorded:  # another machine has signed
        file.record_last_line()
    look = f"; see: {shell_text(['paceline', 'verify', str(run)])}"
    notes = [f"signatures in the run directory were changed: {problem}{look}"] if problem else []
    if unexpected := _unexpected(present, signed):
        are = "checkpoint {} is" if len(unexpected) == 1 else "checkpoints {} are"
        names = ", ".join(unexpected)
        notes.append(f"{are.format(names)} not signed, although an earlier one is{look}")
    newest = max(signed, key=_version, default="")
    if _version(newest) > max(map(_version, present), default=_version("")):
        rest = f"the newest complete one is {present[0]}" if present else "no other is complete"
        notes.append(
            f"checkpoint {newest}, which you signed, is missing or has no manifest; {rest}"
        )
    return notes


def _unexpected(names: Sequence[str], signed: Collection[str]) -> list[str]:
    """The unsigned checkpoints that are newer than the oldest signed one, in their order."""
    oldest = min(map(_version, signed), default=None)
    return [n for n in names if oldest and n not in signed and _version(n) > oldest]


def _is_signed(signed: str | None, raw: bytes) -> bool:
    return signed == hashlib.sha256(raw).hexdigest()


def _uncovered_files(checkpoint: Path, manifest: Manifest) -> list[str]:
    """The files of NFS, which keeps removed files that are still open somewhere.

    Raises DamagedCheckpoint for any other file that the manifest does not name, and for a link: its
    target can change at any time.
    """
    uncovered = []
    for folder, folders, names in safe_paths.walk(str(checkpoint)):
        prefix = f"{folder}/" if folder else ""
        for path in (prefix + name for name in (*folders, *names)):
            if (checkpoint / path).is_symlink():
                raise DamagedCheckpoint(f"{path!r:.100} is a link")
        for name in (prefix + name for name in names):
            if name == MANIFEST or name in manifest.files:
                continue
            if not Path(name).name.startswith(".nfs"):
                raise DamagedCheckpoint(f"{name!r:.100} is not in its manifest")
            uncovered.append(name)
    return uncovered


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
