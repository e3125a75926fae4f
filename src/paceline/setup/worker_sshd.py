"""Runs a worker's own sshd without root: folder, keys, configuration, start and stop.

Standard library only, Python 3.9: the text of this file is also sent to hosts and run there
(``python3 - start --port 12345``). It prints messages for people.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

START_TIMEOUT_S = 5.0  # for sshd to write its process id


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
        f'PidFile "{folder}/sshd.pid"',
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


def running(folder: Path) -> int | None:
    """Returns the process id of our sshd; None if it does not run.

    Process ids are reused, so the command line must name our file.
    """
    try:
        pid = int((folder / "sshd.pid").read_text())
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    # a listening sshd shows its arguments after its name: "sshd: /usr/sbin/sshd -f … [l…"
    return pid if str(folder / "sshd_config").encode() in line else None


def start(folder: Path, port: int, address: str) -> int:
    """Starts sshd, unless it runs; returns 0 if it listens."""
    pid = running(folder)
    if pid is not None:
        print(f"sshd runs already: process {pid}, {folder}")
        return 0
    sbin_folders = "/usr/sbin:/usr/local/sbin:/sbin"  # PATH may lack them
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:{sbin_folders}")
    if sshd is None:
        print("there is no sshd on this machine: sudo apt-get install openssh-server")
        return 1
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = key_file(folder)
    if not key.exists():
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", socket.gethostname()]
        subprocess.run([*argv, "-f", str(key)], check=True, stdin=subprocess.DEVNULL)
    config = folder / "sshd_config"
    config.write_text(config_text(folder, port, address))
    tested = subprocess.run([sshd, "-t", "-f", str(config)], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)  # fmt: skip
    if tested.returncode:
        print(f"sshd refuses its configuration: {tested.stdout.decode().strip()}")
        return 1
    argv = [sshd, "-f", str(config), "-E", str(folder / "sshd.log")]
    subprocess.run(argv, check=False, stdin=subprocess.DEVNULL)
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
    log = folder / "sshd.log"
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
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["start", "stop", "status"])
    parser.add_argument("--port", type=int, default=12345)
    parser.add_argument("--address", default="0.0.0.0")  # noqa: S104 - a login server, keys only
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args(argv)
    folder = arguments.folder or default_folder()
    if arguments.action == "start":
        return start(folder, arguments.port, arguments.address)
    return stop(folder) if arguments.action == "stop" else status(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
