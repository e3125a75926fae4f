"""Sources scripts such as ``setvars.sh`` or ``activate``, and gives ranks their environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from typing import Any, Dict, List, Mapping, Sequence

from ..files import safe_paths, snapshot

INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # of torch's compiled code
SCRIPT_TIMEOUT_S = 120.0
MAX_ERROR_LINES = 12  # of what a script that failed has written
# The shell's own, which say nothing of the environment that was made
_SHELL_VARIABLES = ("_", "SHLVL", "PWD", "OLDPWD", "PS1")
# ``$0`` is the script. One shell for each, so that none sees another's options or arguments.
_SOURCE_SCRIPT = '. "$0" 1>&2 || exit; exec cat /proc/self/environ'


class ActivationError(Exception):
    """A script failed; the text has the end of its output."""


def activate(scripts: Sequence[str], base: Mapping[str, str]) -> Dict[str, str]:
    """Sources the scripts in a shell with the environment ``base``; returns the environment.

    Raises ActivationError if a script is missing, fails, or does not end in time.
    """
    env = dict(base)
    for script in scripts:
        env = _source(os.path.abspath(os.path.expanduser(script)), env)
    return env


def _source(script: str, env: Mapping[str, str]) -> Dict[str, str]:
    if not os.path.isfile(script):
        raise ActivationError("there is no file %s" % script)
    shell = shutil.which("bash") or "/bin/sh"  # such scripts are written for bash
    options = ["--noprofile", "--norc"] if shell.endswith("bash") else []
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(  # no pipes: what the script leaves running would hold them
            [shell, *options, "-c", _SOURCE_SCRIPT, script],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = child.wait(SCRIPT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise ActivationError(
                "%s did not end within %g s" % (script, SCRIPT_TIMEOUT_S)
            ) from None
        for file in (output, errors):
            file.seek(0)
        if status:
            raise ActivationError(_error_text(script, status, errors.read()))
        environ = output.read()
        if not environ:
            raise ActivationError("%s ended before its end, by exit" % script)
        return _variables(environ, env)


def _error_text(script: str, status: int, output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    outcome = "signal %d" % -status if status < 0 else "status %d" % status
    return "\n".join(["%s ended with %s" % (script, outcome), *lines[-MAX_ERROR_LINES:]])


def _variables(text: bytes, base: Mapping[str, str]) -> Dict[str, str]:
    pairs = (entry.partition(b"=") for entry in text.split(b"\0") if b"=" in entry)
    variables = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    for name in _SHELL_VARIABLES:
        variables.pop(name, None)
        if name in base:
            variables[name] = base[name]
    return variables


def changed_names(base: Mapping[str, str], env: Mapping[str, str]) -> List[str]:
    """Returns the names of variables that are new or have another value."""
    return sorted(name for name, value in env.items() if base.get(name) != value)


def job_environment(base: Dict[str, str], request: Dict[str, Any]) -> Dict[str, str]:
    """Returns the environment of fork server and ranks.

    The interpreter's folder comes first in ``PATH``, as in an activated virtual environment, so
    that programs that the script calls by name are those of its own environment.
    """
    env = {name: value for name, value in base.items() if name not in request.get("unset", ())}
    if "/" in request["python"]:
        folder = os.path.dirname(request["python"])
        env["PATH"] = os.pathsep.join([folder, env.get("PATH", os.defpath)])
    env.update(request["env"])
    if request.get("package"):
        folders = [request["package"], env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    if INDUCTOR_CACHE not in (*env, *request.get("unset", ())):
        # torch's default is /tmp/torchinductor_USER, which anybody can create first
        cache = snapshot.cache_folder() / "torchinductor"
        with contextlib.suppress(OSError):
            name = "paceline-inductor-%d" % os.getuid()
            env[INDUCTOR_CACHE] = safe_paths.private_temp_folder(name, str(cache))
    env["PACELINE_JOB_TOKEN"] = request["token"]
    return env
