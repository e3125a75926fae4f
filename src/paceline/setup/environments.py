"""Makes a Python environment on every node from one requirements file."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.agent.files.snapshot import hash_file
from paceline.remote.channel import Channel
from paceline.spec.errors import NodeError, PacelineError, SettingError
from paceline.spec.python_code import DROP_CURRENT_FOLDER
from paceline.transfer.files import send_tree

STAMP = ".paceline-environment"
INSTALL_TIMEOUT_S = 3600.0
TAIL_LINES = 12
_PIP = f"{DROP_CURRENT_FOLDER}; from pip._internal.cli.main import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """A requested environment.

    Attributes:
        folder: Folder of the environment on every node; ``~`` is the node's home.
        python: Interpreter on the nodes that makes it.
        activate: Shell line before the interpreter starts (``module load …``); may be empty.
        offline: Ship wheels from here instead of letting the nodes download them.
    """

    requirements: Path
    folder: str
    python: str
    activate: str = ""
    offline: bool = False

    @property
    def digest(self) -> str:
        """Hash of the content; an environment with this stamp is up to date."""
        text = f"{self.requirements.read_text()}\0{self.python}\0{self.activate}"
        return hashlib.sha256(text.encode()).hexdigest()


async def one_node_per_disk(channels: Sequence[Channel], spec: EnvironmentSpec) -> list[Channel]:
    """Returns, for each node, the first node with the environment's folder on the same disk.

    Hosts that share their home directory must not make one environment at the same time.
    """
    marks = [f"{folder_on(channel, spec)}.{channel.identity}" for channel in channels]
    make_mark = ["/bin/sh", "-c", 'mkdir -p "${0%/*}" && : > "$0"']
    remove_mark = ["/bin/sh", "-c", 'rm -f "$0"']
    pairs = list(zip(channels, marks, strict=True))
    try:
        await asyncio.gather(*(_execute(channel, [*make_mark, mark]) for channel, mark in pairs))
        replies = await asyncio.gather(*(c.request("look", paths=marks) for c in channels))
    finally:
        removals = (_execute(channel, [*remove_mark, mark], check=False) for channel, mark in pairs)
        await asyncio.gather(*removals, return_exceptions=True)
    seen = [[path["exists"] for path in reply["paths"]] for reply in replies]
    return [channels[row.index(True)] if True in row else channel
            for row, channel in zip(seen, channels, strict=True)]  # fmt: skip


def folder_on(channel: Channel, spec: EnvironmentSpec) -> str:
    """Returns the path of the environment on one node, without ``~``."""
    return spec.folder.replace("~", str(channel.facts["user"]["home"]), 1).rstrip("/")


async def make_environment(channel: Channel, spec: EnvironmentSpec, wheels: Path | None) -> str:
    """Makes the environment on one node, unless it is up to date; returns what was done.

    Args:
        wheels: Local folder of wheels to ship; ``None`` lets the node download them.

    Raises:
        NodeError: A step failed there; has the last lines of its output.
    """
    name = channel.host.name
    folder = folder_on(channel, spec)
    stamp = await _execute(channel, ["cat", f"{folder}/{STAMP}"], check=False)
    if stamp["output"].strip() == spec.digest:
        return f"{name}: {folder} is up to date"
    await _execute(channel, [spec.python, "-I", "-m", "venv", folder])
    python = f"{folder}/bin/python"
    pip = [python, "-I", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    shipped = await _ship(channel, spec.requirements, wheels)
    source = ["--no-index", "--find-links", f"{shipped}/wheels"] if wheels else []
    await _execute(channel, [*pip, *source, "-r", f"{shipped}/requirements.txt"])
    if spec.activate:
        script = f'{spec.activate} >/dev/null || exit 1\nexec {shlex.quote(python)} "$@"\n'
        await _write(channel, f"{python}-activated", f"#!/bin/sh\n{script}")
    await _write(channel, f"{folder}/{STAMP}", spec.digest)
    return f"{name}: {folder} made{' from shipped wheels' if wheels else ''}"


async def _ship(channel: Channel, requirements: Path, wheels: Path | None) -> str:
    """Sends requirements and wheels to the node; returns their folder there."""
    files = {"requirements.txt": requirements}
    for file in sorted(wheels.iterdir()) if wheels else []:
        files[f"wheels/{file.name}"] = file
    manifest = await asyncio.to_thread(lambda: [
        [name, hash_file(file), 0o600, file.stat().st_size] for name, file in files.items()
    ])  # fmt: skip
    return await send_tree(channel, manifest, files.__getitem__, secrets.token_hex(8), "env")


async def _write(channel: Channel, path: str, text: str) -> None:
    await _execute(channel, ["/bin/sh", "-c", 'cat > "$0" && chmod 755 "$0"', path], text)


async def _execute(channel: Channel, argv: Sequence[str], text: str = "",
                   check: bool = True) -> dict[str, Any]:  # fmt: skip
    request = channel.request("execute", argv=list(argv), input=text, timeout_s=INSTALL_TIMEOUT_S)
    reply = dict(await asyncio.wait_for(request, INSTALL_TIMEOUT_S + 10))
    if check and reply["code"] != 0:
        tail = "\n".join(str(reply["output"]).strip().splitlines()[-TAIL_LINES:])
        message = f"{channel.host.name}: {shlex.join(argv)[:160]} failed"
        raise NodeError(message, found=tail, remedy=_remedy(tail))
    return reply


def combine_failures(failures: Sequence[PacelineError]) -> PacelineError:
    """Returns one error for failures on several nodes; equal remedies are given once."""
    if len(failures) == 1:
        return failures[0]
    return NodeError(
        f"{len(failures)} hosts have no environment",
        found="\n".join(f"{failure.message}\n{failure.found}".strip() for failure in failures),
        remedy="\n".join(dict.fromkeys(failure.remedy for failure in failures)),
    )


def _remedy(output: str) -> str:
    if "ensurepip" in output or "python3-venv" in output:
        return "Install the venv module there: sudo apt-get install python3-venv"
    if "No matching distribution" in output or "Connection" in output or "resolve" in output:
        return "The node cannot download: add --offline, which ships the wheels from here"
    return "Correct the requirements, then type the same command again"


def download_wheels(requirements: Path) -> Path:
    """Downloads wheels into a fresh local folder; SettingError with pip's output if that fails."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-wheels-"))
    argv = [sys.executable, "-c", _PIP, "wheel", "--disable-pip-version-check", "-q"]
    argv += ["-w", str(folder), "-r", str(requirements)]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    if result.returncode:
        tail = "\n".join((result.stderr or result.stdout).strip().splitlines()[-TAIL_LINES:])
        raise SettingError(f"pip could not get the wheels of {requirements} here", found=tail)
    return folder
