"""Scripts that make an environment (``setvars.sh``, ``activate``): what they set, for the ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from typing import Dict, List, Mapping, Sequence

PATIENCE_S = 120.0
TOLD_LINES = 12  # of what a script that failed has written
# The shell's own, which say nothing of the environment that was made
_SHELLS_OWN = ("_", "SHLVL", "PWD", "OLDPWD", "PS1")
# ``$0`` is the script. One shell for each, so that none sees another's options or arguments.
_TEXT = '. "$0" 1>&2 || exit; exec cat /proc/self/environ'


class ActivationError(Exception):
    """A script failed; its last words are the text."""


def after(scripts: Sequence[str], base: Mapping[str, str]) -> Dict[str, str]:
    """The environment that ``base`` becomes when a shell has sourced each script.

    Raises:
        ActivationError: A script is not there, fails, or does not come to an end.
    """
    env = dict(base)
    for script in scripts:
        env = _sourced(os.path.abspath(os.path.expanduser(script)), env)
    return env


def _sourced(script: str, env: Mapping[str, str]) -> Dict[str, str]:
    if not os.path.isfile(script):
        raise ActivationError("there is no file %s" % script)
    shell = shutil.which("bash") or "/bin/sh"  # such scripts are written for bash
    options = ["--noprofile", "--norc"] if shell.endswith("bash") else []
    with tempfile.TemporaryFile() as found, tempfile.TemporaryFile() as words:
        child = subprocess.Popen(  # no pipes: what the script leaves running would hold them
            [shell, *options, "-c", _TEXT, script],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=found,
            stderr=words,
            start_new_session=True,
        )
        try:
            status = child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise ActivationError("%s did not end within %g s" % (script, PATIENCE_S)) from None
        for file in (found, words):
            file.seek(0)
        if status:
            raise ActivationError(_words(script, status, words.read()))
        told = found.read()
        if not told:
            raise ActivationError("%s ended before its end, by exit" % script)
        return _variables(told, env)


def _words(script: str, status: int, words: bytes) -> str:
    lines = words.decode(errors="replace").strip().splitlines()
    how = "signal %d" % -status if status < 0 else "status %d" % status
    return "\n".join(["%s ended with %s" % (script, how), *lines[-TOLD_LINES:]])


def _variables(text: bytes, before: Mapping[str, str]) -> Dict[str, str]:
    pairs = (entry.partition(b"=") for entry in text.split(b"\0") if b"=" in entry)
    found = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    for name in _SHELLS_OWN:
        found.pop(name, None)
        if name in before:
            found[name] = before[name]
    return found


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> List[str]:
    """Names of variables that were set anew or differently."""
    return sorted(name for name, value in now.items() if before.get(name) != value)
