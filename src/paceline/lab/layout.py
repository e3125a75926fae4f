"""Where a lab keeps its files: one folder, gone when the lab is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MARKER = "/run/paceline-lab"  # exists inside the hosts only; holds the lab's name
HOMES = "/run/home"  # parent of the login user's HOME inside a host


@dataclass(frozen=True)
class Layout:
    """Paths below a lab's state folder ``root``."""

    root: Path

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def owner(self) -> Path:
        """Process id and start time of the lab's owner."""
        return self.root / "owner.json"

    @property
    def owner_log(self) -> Path:
        return self.root / "owner.log"

    @property
    def control(self) -> Path:
        return self.root / "control.sock"

    @property
    def ssh_config(self) -> Path:
        return self.root / "ssh_config"

    @property
    def identity(self) -> Path:
        return self.root / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    @property
    def hostfile(self) -> Path:
        return self.root / "hostfile"

    @property
    def settings(self) -> Path:
        """Per-host settings in the form of paceline.toml."""
        return self.root / "paceline.toml"

    def host(self, name: str) -> Path:
        return self.root / "hosts" / name

    def home(self, name: str) -> Path:
        return self.host(name) / "home"

    def etc(self, name: str) -> Path:
        """Files that the host sees in /etc."""
        return self.host(name) / "etc"

    def host_key(self, name: str) -> Path:
        return self.host(name) / "ssh_host_ed25519_key"

    def sshd_config(self, name: str) -> Path:
        return self.host(name) / "sshd_config"

    def sshd_log(self, name: str) -> Path:
        return self.host(name) / "sshd.log"

    def disk(self, name: str, index: int) -> Path:
        """What the host wrote into its private folder number ``index``."""
        return self.host(name) / "private" / str(index)
