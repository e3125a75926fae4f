"""Runs a worker's own sshd without root: folder, keys, configuration, start and stop.

Python 3.9: :func:`script_text` is also sent to hosts without Paceline and run there
(``python3 -I - start --port 12345``). It prints messages for people.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.agent.bootstrap import is_private_group

OPEN = "can be written by others"
START_TIMEOUT_S = 5.0  # for sshd to write its process id
CONFIG, PID, LOG = "sshd_config", "sshd.pid", "sshd.log"
_IMPORT = "from paceline.agent.bootstrap import is_private_group\n"


def script_text() -> str:
    """Returns this module with the function that it imports, for a host without Paceline."""
    import inspect

    source = Path(__file__).read_text(encoding="utf-8")
    return source.replace(_IMPORT, inspect.getsource(is_private_group), 1)


def default_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(base) / "paceline" / "sshd" / socket.gethostname()  # hosts may share it


def key_file(folder: Path) -> Path:
    return folder / "ssh_host_ed25519_key"


def config_text(folder: Path, port: int, address: str) -> str:
    """Returns the configuration: keys only, one user, no forwarding."""
    lines = [
        "# made by paceline setup sshd",
        f"Port {port}",
        f"ListenAddress {address}",
        f'HostKey "{key_file(folder)}"',
        f'PidFile "{folder}/{PID}"',
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PubkeyAuthentication yes",
        "AuthorizedKeysFile .ssh/authorized_keys",
        "PermitRootLogin prohibit-password",
        "AllowTcpForwarding no",
        "X11Forwarding no",
        "PrintMotd no",
        "LogLevel INFO",
        "Subsystem sftp internal-sftp",
    ]
    return "\n".join(lines) + "\n"


def _open_unlinked(path: str, flags: int) -> int:
    """Opens a file, but no link, and does not wait for a named pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def running(folder: Path) -> int | None:
    """Returns the process id of our sshd; None if it does not run.

    Process ids are reused, so the command line must name our file.
    """
    try:
        with open(folder / PID, opener=_open_unlinked) as file:
            pid = int(file.read(20))
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    # a listening sshd shows its arguments after its name: "sshd: /usr/sbin/sshd -f … [l…"
    return pid if str(folder / CONFIG).encode() in line else None


def folder_faults(folder: Path) -> dict[str, str]:
    """Returns why others could replace the folder, by path: it, or a folder or link on its way.

    The way may lead through links of this user or root. Folders that are missing have no fault.
    """
    faults = {}
    real = folder if folder.is_symlink() else Path(os.path.realpath(folder))
    for path in dict.fromkeys([*reversed(folder.parents), *reversed(real.parents), folder, real]):
        if not os.path.lexists(path):
            continue
        status = os.lstat(path)
        is_ours, is_link = path in (folder, real), stat.S_ISLNK(status.st_mode)
        owners = [os.getuid()] if is_ours else [0, os.getuid()]
        writable = 0 if is_link else status.st_mode & 0o022
        if writable == 0o020 and is_private_group(status.st_gid):  # type: ignore[no-untyped-call]
            writable = 0
        is_sticky = not is_ours and status.st_mode & stat.S_ISVTX  # as /tmp: names are kept
        # where root has no number (containers), the root folder belongs to another user
        if status.st_uid not in owners and path != path.parent:
            faults[f"{path}"] = f"belongs to the user with the id {status.st_uid}"
        elif is_ours and not stat.S_ISDIR(status.st_mode):
            faults[f"{path}"] = f"is a link to {path.readlink()}" if is_link else "is no folder"
        elif writable and not is_sticky:
            faults[f"{path}"] = f"{OPEN} (mode {stat.S_IMODE(status.st_mode):o})"
    return faults


def file_faults(folder: Path) -> dict[str, str]:
    """Returns why files in the folder may be of others, by path: sshd would write through links."""
    faults = {}
    key = key_file(folder)
    for path in (key, Path(f"{key}.pub"), *(folder / name for name in (CONFIG, PID, LOG))):
        if not os.path.lexists(path):
            continue
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            faults[f"{path}"] = f"is a link to {path.readlink()}"
        elif not stat.S_ISREG(status.st_mode):
            faults[f"{path}"] = "is no plain file"
        elif status.st_uid != os.getuid():
            faults[f"{path}"] = f"belongs to the user with the id {status.st_uid}"
    return faults


def refusal(folder: Path) -> str:
    """Returns why sshd must not use the folder and what to type; empty if it may."""
    faults = folder_faults(folder)
    closable = [path for path, fault in faults.items()
                if fault.startswith(OPEN) and os.lstat(path).st_uid == os.getuid()]  # fmt: skip
    steps = [f"chmod go-w {shlex.join(closable)}"] if closable else []
    foreign = [path for path in faults if path not in closable]
    if foreign == [str(folder)]:  # its parent is ours
        steps.append(f"mv {shlex.join([str(folder), f'{folder}.foreign'])}")
    elif foreign:
        steps = ["give another folder, which only you can write: --folder FOLDER"]
    if not faults and (faults := file_faults(folder)):
        steps = [f"look at them, then: rm -r {shlex.join(faults)}"]
    lines = [f"  {path} {fault}" for path, fault in faults.items()]
    first = "sshd was not started, because other users could change its files or have done so:"
    return "\n".join([first, *lines, f"remedy: {' && '.join(steps)}"]) if faults else ""


def _make_folder(folder: Path) -> str:
    """Makes the folder if others cannot replace it; returns the refusal otherwise."""
    if message := refusal(folder):
        return message
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # the umask closes its parents
    except OSError as error:
        return f"sshd was not started: {error}\nremedy: give another folder: --folder FOLDER"
    return refusal(folder)


def _replace_file(path: Path, text: str) -> None:
    """Writes a file under another name first, so that it never writes through a link."""
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    os.replace(temporary, path)  # noqa: PTH105


def start(folder: Path, port: int, address: str, umask: int = 0o077) -> int:
    """Starts sshd, unless it runs; returns 0 if it listens.

    ``umask`` is that of sshd, and thus of its sessions.
    """
    if message := _make_folder(folder):
        print(message)
        return 1
    pid = running(folder)
    if pid is not None:
        print(f"sshd runs already: process {pid}, {folder}")
        return 0
    sbin_folders = "/usr/sbin:/usr/local/sbin:/sbin"  # PATH may lack them
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:{sbin_folders}")
    if sshd is None:
        print("there is no sshd on this machine: sudo apt-get install openssh-server")
        return 1
    key = key_file(folder)
    if not key.exists():
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", socket.gethostname()]
        subprocess.run([*argv, "-f", str(key)], check=True, stdin=subprocess.DEVNULL)
    config = folder / CONFIG
    _replace_file(config, config_text(folder, port, address))
    tested = subprocess.run([sshd, "-t", "-f", str(config)], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)  # fmt: skip
    if tested.returncode:
        print(f"sshd refuses its configuration: {tested.stdout.decode().strip()}")
        return 1
    argv = [sshd, "-f", str(config), "-E", str(folder / LOG)]
    subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, umask=umask)
    return _wait_until_running(folder, port)


def _wait_until_running(folder: Path, port: int) -> int:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        pid = running(folder)
        if pid is not None:
            print(f"sshd listens on port {port}: process {pid}, {folder}")
            argv = ["ssh-keygen", "-lf", f"{key_file(folder)}.pub"]
            result = subprocess.run(argv, stdout=subprocess.PIPE, check=False)
            print(f"host key: {result.stdout.decode().strip()}")
            return 0
        time.sleep(0.05)
    print("sshd did not start; its log:")
    log = folder / LOG
    print("".join(log.read_text().splitlines(True)[-5:]) if log.exists() else "(none)")
    return 1


def stop(folder: Path) -> int:
    """Stops sshd and waits for its end; open sessions go on."""
    pid = running(folder)
    if pid is None:
        print(f"sshd does not run ({folder})")
        return 0
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 5
    while running(folder) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    if running(folder) is not None:
        print(f"sshd (process {pid}) did not end")
        return 1
    print("sshd stopped")
    return 0


def status(folder: Path) -> int:
    """Returns 0 if it runs and 3 if it does not, as service managers do."""
    pid = running(folder)
    print(f"sshd runs: process {pid}, {folder}" if pid else "sshd does not run")
    return 0 if pid else 3


def main(argv: list[str]) -> int:
    """Runs the command; our files are private, whatever the umask of the login is."""
    umask = os.umask(0o077)
    try:
        return _run(argv, umask)
    finally:
        os.umask(umask)


def _run(argv: list[str], umask: int) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["start", "stop", "status"])
    parser.add_argument("--port", type=int, default=12345)
    parser.add_argument("--address", default="0.0.0.0")  # noqa: S104 - a login server, keys only
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args(argv)
    folder = Path(os.path.abspath(arguments.folder or default_folder()))  # noqa: PTH100
    if arguments.action == "start":
        return start(folder, arguments.port, arguments.address, umask)
    return stop(folder) if arguments.action == "stop" else status(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
