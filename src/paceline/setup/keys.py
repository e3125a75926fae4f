"""The identity by which hosts know us: found, or made."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.setup.journal import Change, Journal, digest
from paceline.spec.errors import SettingError

DEFAULT_NAMES = ("id_ed25519", "id_ecdsa", "id_rsa", "id_ed25519_sk", "id_ecdsa_sk")
WEAK_RSA_BITS = 3072
KINDS = {"ed25519": ["-t", "ed25519"], "rsa": ["-t", "rsa", "-b", "4096"]}  # never dsa


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair.

    Attributes:
        private: The private half; ``None`` when it lives in an agent only.
        public: The line for ``authorized_keys``.
        exists: False when it is still to be made.
    """

    private: Path | None
    public: str
    exists: bool = True


def choose(key: Path | None, configured: Sequence[Path], agent_keys: Sequence[str],
           folder: Path) -> Identity:  # fmt: skip
    """The identity to use: the one asked for, else one that ssh would offer, else a new one.

    Args:
        key: Asked for; need not exist yet.
        configured: Identity files that ssh would try, in order.
        agent_keys: Public lines that the agent offers.
        folder: ``~/.ssh``.
    """
    if key is not None:
        return _read(key) if key.exists() else Identity(key, "", exists=False)
    for path in configured:
        if path.exists():
            return _read(path)
    usable = [line for line in agent_keys if not line.startswith("ssh-dss")]
    if usable:
        return Identity(None, usable[0])
    return Identity(folder / "id_ed25519", "", exists=False)


def _read(private: Path) -> Identity:
    """An existing pair; the public half is computed when its file is missing."""
    file = private.with_name(private.name + ".pub")
    if file.exists():
        line = file.read_text(encoding="utf-8").strip()
    else:
        done = _run(["ssh-keygen", "-y", "-P", "", "-f", str(private)])
        line = done.stdout.strip()
        if done.returncode:
            raise SettingError(
                f"the key {private} cannot be used without its passphrase",
                found=done.stderr.strip(),
                remedy=f"ssh-add {private}, or --key with another file",
            )
    _refuse_dsa(private, line)
    return Identity(private, line)


def _refuse_dsa(private: Path, line: str) -> None:
    if line.startswith("ssh-dss"):
        raise SettingError(
            f"the key {private} is a DSA key",
            found="OpenSSH 10 does not know DSA any more",
            remedy="--key ~/.ssh/id_ed25519 makes a new one",
        )


def make(identity: Identity, kind: str, journal: Journal) -> Identity:
    """Makes the pair without a passphrase; both files go into the journal."""
    private = identity.private
    assert private is not None
    if not private.parent.is_dir():
        journal.add(Change(str(private.parent), None, None, folder=True))
        private.parent.mkdir(mode=0o700, parents=True)
    argv = ["ssh-keygen", "-q", *KINDS[kind], "-N", "", "-C", "paceline", "-f", str(private)]
    done = _run(argv)
    if done.returncode:
        raise SettingError(f"ssh-keygen could not make {private}", found=done.stderr.strip())
    public = private.with_name(private.name + ".pub")
    for file in (private, public):
        journal.add(Change(str(file), None, None, digest(file.read_bytes())))
    return Identity(private, public.read_text(encoding="utf-8").strip())


def agent_keys() -> list[str]:
    """Public lines of the keys that the ssh agent holds; empty without an agent."""
    done = _run(["ssh-add", "-L"])
    return [line for line in done.stdout.splitlines() if line] if done.returncode == 0 else []


def fingerprint(public: str) -> str:
    """``256 SHA256:… comment (ED25519)``."""
    done = subprocess.run(
        ["ssh-keygen", "-lf", "-"], input=public, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or done.stderr.strip()


def weak(public: str) -> bool:
    """True for an RSA key of fewer bits than is advised."""
    words = fingerprint(public).split()
    return bool(words) and words[-1] == "(RSA)" and int(words[0]) < WEAK_RSA_BITS


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
