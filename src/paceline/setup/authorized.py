"""The public key on a host: a small shell script, sent over standard input.

The script tells what it found and did in lines that begin with ``paceline ``; everything else on
its output is a login banner.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.setup.journal import Change

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
class Installed:
    """What the install script reported.

    Attributes:
        changed: The file, folder or a mode is another now.
        before, after: The file's content in base64; ``None`` when it did not exist.
        file_mode, folder_mode, home_mode: As ``chmod`` takes them; ``none`` for what was not there.
        failed: Why it could not; empty when it could.
    """

    changed: bool
    before: str | None
    after: str
    file_mode: str
    folder_mode: str
    home_mode: str
    failed: str = ""


def install_script(key: str) -> str:
    """Installs the key once and closes over-open permissions."""
    return _INSTALL.format(key=shlex.quote(key.strip()), body=_BODY)


def read_report(output: str) -> Installed:
    """What the install script said; ``failed`` when it said too little."""
    said: dict[str, list[str]] = {}
    for line in output.splitlines():
        if line.startswith("paceline "):
            word, *rest = line.removeprefix("paceline ").split(" ")
            said[word] = rest
    if "failed" in said or "done" not in said:
        why = " ".join(said.get("failed", [])) or "the script did not run to its end"
        return Installed(False, None, "", "none", "none", "none", why)
    file = said["file"]
    before = file[1] if file[0] != "none" and len(file) > 1 else None if file[0] == "none" else ""
    after = said["done"][0] if said["done"] else ""
    modes = (_octal(file[0]), _octal(said["folder"][0]), _octal(said["home"][0]))
    closed = modes[0] == "600" and modes[1] == "700" and not _open_to_others(modes[2])
    return Installed(before != after or not closed, before, after, *modes)


def _octal(text: str) -> str:
    """``drwxr-x---`` → ``750``; ``none`` stays."""
    if text == "none":
        return text
    bits = [text[at : at + 3] for at in (1, 4, 7)]
    values = {"r": 4, "w": 2, "x": 1, "s": 1, "t": 1}
    return "".join(str(sum(values.get(char, 0) for char in three)) for three in bits)


def _open_to_others(mode: str) -> bool:
    return any(int(digit) & 2 for digit in mode[1:])


def change_of(host: str, key: str, installed: Installed) -> Change:
    """The journal's entry for one host."""
    mode = None if installed.before is None else int(installed.file_mode, 8)
    states = f"{installed.folder_mode} {installed.home_mode}"
    return Change("~/.ssh/authorized_keys", installed.before, mode, installed.after, host,
                  (key, states))  # fmt: skip


def revoke_script(change: Change) -> str:
    """Takes one host's change back."""
    key, states = change.lines
    folder, home = states.split()
    values: Mapping[str, str] = {
        "after": shlex.quote(change.after),
        "existed": "no" if change.before is None else "yes",
        "before": shlex.quote(change.before or ""),
        "mode": f"{change.mode:o}" if change.mode is not None else "600",
        "key": shlex.quote(key),
        "folder": folder,
        "home": home,
    }
    return _REVOKE.format(**values)
