"""A worker's own sshd, without root: its folder, keys, configuration, start and stop.

Standard library only, Python 3.9: this file's text is also sent to hosts and run there
(``python3 - start --port 12345``). It prints lines for people.
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

DEFAULT_PORT = 12345


def default_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(base) / "paceline" / "sshd" / socket.gethostname()  # hosts may share it


def key_file(folder: Path) -> Path:
    return folder / "ssh_host_ed25519_key"


def find_sshd() -> str | None:
    """sshd has to be called by its absolute path; sbin is not on everybody's PATH."""
    return shutil.which(
        "sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin:/sbin"
    )


def config_text(folder: Path, port: int, address: str) -> str:
    """The configuration: keys only, one user, nothing forwarded."""
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
    """The process id of our sshd; None when it does not run.

    A number alone may have been given to another process: the command line must name our file.
    """
    try:
        pid = int((folder / "sshd.pid").read_text())
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    # once it listens, sshd writes its arguments behind its name: "sshd: /usr/sbin/sshd -f … [l…"
    return pid if str(folder / "sshd_config").encode() in line else None


def start(folder: Path, port: int, address: str) -> int:
    """Starts it, unless it runs; 0 when it listens."""
    pid = running(folder)
    if pid is not None:
        print(f"sshd runs already: process {pid}, {folder}")
        return 0
    sshd = find_sshd()
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
    return _wait(folder, port)


def _wait(folder: Path, port: int, patience_s: float = 5.0) -> int:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        pid = running(folder)
        if pid is not None:
            print(f"sshd listens on port {port}: process {pid}, {folder}")
            print(f"host key: {fingerprint(folder)}")
            return 0
        time.sleep(0.05)
    print("sshd did not start; its log:")
    log = folder / "sshd.log"
    print("".join(log.read_text().splitlines(True)[-5:]) if log.exists() else "(none)")
    return 1


def fingerprint(folder: Path) -> str:
    argv = ["ssh-keygen", "-lf", f"{key_file(folder)}.pub"]
    return subprocess.run(argv, stdout=subprocess.PIPE, check=False).stdout.decode().strip()


def stop(folder: Path) -> int:
    """Ends it and waits for its end; sessions that are open go on."""
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
    """0 when it runs, 3 when it does not (as service managers say it)."""
    pid = running(folder)
    print(f"sshd runs: process {pid}, {folder}" if pid else "sshd does not run")
    return 0 if pid else 3


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["start", "stop", "status"])
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--address", default="0.0.0.0")  # noqa: S104 - a login server, keys only
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args(argv)
    folder = given.folder or default_folder()
    if given.action == "start":
        return start(folder, given.port, given.address)
    return stop(folder) if given.action == "stop" else status(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
