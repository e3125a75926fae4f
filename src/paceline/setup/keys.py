"""Our SSH key: found or made here, installed on and removed from hosts.

A host runs a shell script that is sent over standard input. The script reports in lines that begin
with ``paceline ``; all other output is a login banner.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.agent.files import safe_paths
from paceline.setup.journal import Change, Journal, digest
from paceline.spec.errors import SettingError

DEFAULT_NAMES = ("id_ed25519", "id_ecdsa", "id_rsa", "id_ed25519_sk", "id_ecdsa_sk")
KINDS = {"ed25519": ["-t", "ed25519"], "rsa": ["-t", "rsa", "-b", "4096"]}  # never dsa


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair: the private file (``None`` if only an agent has it) and the public line.

    ``exists`` is False if it is still to be made.
    """

    private: Path | None
    public: str
    exists: bool = True


def choose_identity(key: Path | None, configured: Sequence[Path], agent_keys: Sequence[str],
           folder: Path) -> Identity:  # fmt: skip
    """Returns the requested identity, else one that ssh would offer, else a new one.

    Args:
        key: The requested key file; need not exist yet.
        configured: Identity files that ssh would try, in order.
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
    """Reads a key pair; the public key is derived if its file is missing."""
    file = private.with_name(private.name + ".pub")
    if file.exists():
        line = file.read_text(encoding="utf-8").strip()
    else:
        result = _run(["ssh-keygen", "-y", "-P", "", "-f", str(private)])
        line = result.stdout.strip()
        if result.returncode:
            raise SettingError(
                f"the key {private} cannot be used without its passphrase",
                found=result.stderr.strip(),
                remedy=f"ssh-add {private}, or --key with another file",
            )
    if line.startswith("ssh-dss"):
        raise SettingError(
            f"the key {private} is a DSA key",
            found="OpenSSH 10 does not know DSA any more",
            remedy="--key ~/.ssh/id_ed25519 makes a new one",
        )
    return Identity(private, line)


def make_key_pair(identity: Identity, kind: str, journal: Journal) -> Identity:
    """Makes the key pair without a passphrase; both files are recorded in the journal."""
    private = identity.private
    assert private is not None
    if not private.parent.is_dir():
        journal.add(Change(str(private.parent), None, None, folder=True))
        safe_paths.make_folder(str(private.parent))
    argv = ["ssh-keygen", "-q", *KINDS[kind], "-N", "", "-C", "paceline", "-f", str(private)]
    result = _run(argv)
    if result.returncode:
        raise SettingError(f"ssh-keygen could not make {private}", found=result.stderr.strip())
    public = private.with_name(private.name + ".pub")
    for file in (private, public):
        journal.add(Change(str(file), None, None, digest(file.read_bytes())))
    return Identity(private, public.read_text(encoding="utf-8").strip())


def agent_keys() -> list[str]:
    """Returns the public keys that the ssh agent holds; empty without an agent."""
    result = _run(["ssh-add", "-L"])
    return [line for line in result.stdout.splitlines() if line] if result.returncode == 0 else []


def fingerprint(public: str) -> str:
    """Returns the fingerprint as ssh-keygen prints it: ``256 SHA256:… comment (ED25519)``."""
    result = _run(["ssh-keygen", "-lf", "-"], public)
    return result.stdout.strip() or result.stderr.strip()


def _run(argv: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=text, capture_output=True, text=True, check=False)


# POSIX sh. Reports modes with ls, because stat differs between systems.
_INSTALL = r"""
set -u
umask 077
key={key}
home=$HOME; folder=$home/.ssh; file=$folder/authorized_keys
mode() {{ ls -ld "$1" | cut -c1-10; }}
say() {{ printf 'paceline %s\n' "$*"; }}
say home "$(mode "$home")" "$home"
if [ -d "$folder" ]; then say folder "$(mode "$folder")"; else say folder none; fi
if [ -f "$file" ]; then say file "$(mode "$file")" "$(base64 < "$file" | tr -d '\n')"
else say file none; fi
{body}
say done "$(base64 < "$file" 2>/dev/null | tr -d '\n')"
"""
_BODY = r"""
mkdir -p "$folder" || { say failed "cannot make $folder"; exit 1; }
chmod go-w "$home" 2>/dev/null; chmod 700 "$folder"
if ! { [ -f "$file" ] && grep -qxF -e "$key" "$file"; }; then
  if [ -s "$file" ] && [ -n "$(tail -c1 "$file")" ]; then echo >> "$file"; fi
  printf '%s\n' "$key" >> "$file" || { say failed "cannot write $file"; exit 1; }
fi
chmod 600 "$file"
"""
_REVOKE = r"""
set -u
umask 077
say() {{ printf 'paceline %s\n' "$*"; }}
home=$HOME; folder=$home/.ssh; file=$folder/authorized_keys
if [ -f "$file" ]; then
  now=$(base64 < "$file" | tr -d '\n')
  if [ "$now" = {after} ]; then
    if [ {existed} = yes ]; then
      printf '%s' {before} | base64 -d > "$file.paceline-new" && chmod {mode} "$file.paceline-new" \
        && mv "$file.paceline-new" "$file" && say restored
    else rm -f "$file" && say removed; fi
  else
    grep -vxF -e {key} "$file" > "$file.paceline-new"
    chmod 600 "$file.paceline-new" && mv "$file.paceline-new" "$file" && say cut
  fi
fi
if [ {folder} = none ]; then rmdir "$folder" 2>/dev/null
else chmod {folder} "$folder" 2>/dev/null; fi
chmod {home} "$home" 2>/dev/null
say done
"""


@dataclass(frozen=True, slots=True)
class InstallReport:
    """Report of the install script.

    Attributes:
        changed: Whether the file, the folder or a mode has changed.
        before, after: Content of the file in base64; ``None`` if it did not exist.
        file_mode, folder_mode, home_mode: Modes for ``chmod``; ``none`` if it did not exist.
        failed: Why the script failed; empty if it succeeded.
    """

    changed: bool
    before: str | None
    after: str
    file_mode: str
    folder_mode: str
    home_mode: str
    failed: str = ""


def install_script(key: str) -> str:
    """Returns the script that installs the key once and closes permissions that are too open."""
    return _INSTALL.format(key=shlex.quote(key.strip()), body=_BODY)


def read_report(output: str) -> InstallReport:
    """Parses the report of the install script; ``failed`` is set if it is incomplete."""
    values: dict[str, list[str]] = {}
    for line in output.splitlines():
        if line.startswith("paceline "):
            keyword, *fields = line.removeprefix("paceline ").split(" ")
            values[keyword] = fields
    if "failed" in values or "done" not in values:
        failure = " ".join(values.get("failed", [])) or "the script did not run to its end"
        return InstallReport(False, None, "", "none", "none", "none", failure)
    file = values["file"]
    before = file[1] if file[0] != "none" and len(file) > 1 else None if file[0] == "none" else ""
    after = values["done"][0] if values["done"] else ""
    modes = (_octal(file[0]), _octal(values["folder"][0]), _octal(values["home"][0]))
    is_home_writable = any(int(digit) & 2 for digit in modes[2][1:])  # by others
    is_private = modes[0] == "600" and modes[1] == "700" and not is_home_writable
    return InstallReport(before != after or not is_private, before, after, *modes)


def _octal(text: str) -> str:
    """Converts a mode to octal: ``drwxr-x---`` → ``750``; ``none`` is kept."""
    if text == "none":
        return text
    bits = [text[at : at + 3] for at in (1, 4, 7)]
    values = {"r": 4, "w": 2, "x": 1, "s": 1, "t": 1}
    return "".join(str(sum(values.get(char, 0) for char in three)) for three in bits)


def change_record(host: str, key: str, installed: InstallReport) -> Change:
    mode = None if installed.before is None else int(installed.file_mode, 8)
    states = f"{installed.folder_mode} {installed.home_mode}"
    return Change("~/.ssh/authorized_keys", installed.before, mode, installed.after, host,
                  (key, states))  # fmt: skip


def revoke_script(change: Change) -> str:
    key, states = change.lines
    folder_mode, home_mode = states.split()
    values: Mapping[str, str] = {
        "after": shlex.quote(change.after),
        "existed": "no" if change.before is None else "yes",
        "before": shlex.quote(change.before or ""),
        "mode": f"{change.mode:o}" if change.mode is not None else "600",
        "key": shlex.quote(key),
        "folder": folder_mode,
        "home": home_mode,
    }
    return _REVOKE.format(**values)
