"""Checks whether a lab can be made on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from paceline.lab import kernel
from paceline.spec.errors import LabError

LAB_NAMESPACES = (
    kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
)
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_TOOLS = {  # program → Debian package
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "tc": "iproute2",
    "iptables": "iptables",
}
_FAULT_TOOLS = {"nft": "nftables"}


def missing_tool(tool: str) -> LabError:
    package = {**_TOOLS, **_FAULT_TOOLS}.get(tool, tool)
    return LabError(f"{tool} is not installed", remedy=f"sudo apt-get install {package}")


def find_tool(tool: str) -> str | None:
    """The path of a system tool; ordinary users have no sbin on their PATH."""
    return shutil.which(tool, path=_SYSTEM_PATH)


def require() -> None:
    """Raises LabError if this machine lacks programs that a lab needs; does not check rights."""
    if not sys.platform.startswith("linux"):
        raise LabError("a lab needs Linux", found=f"this is {sys.platform}")
    if packages := sorted({package for tool, package in _TOOLS.items() if not find_tool(tool)}):
        raise LabError(
            "a lab needs programs that this machine lacks",
            found=f"not installed: {', '.join(packages)}",
            remedy=f"sudo apt-get install {' '.join(packages)}",
        )


def namespace_error(error: OSError) -> LabError:
    return LabError(
        "this machine does not allow new namespaces", found=str(error), remedy=_namespace_remedy()
    )


def enter_namespaces() -> None:
    """Moves the calling process into new namespaces; raises OSError if that is refused."""
    if os.geteuid() != 0:
        kernel.enter_user_namespace()
        kernel.preserve_capabilities()
    kernel.unshare(LAB_NAMESPACES)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)


def main(_: list[str]) -> int:
    """Tries a lab's first steps, in a process of its own; prints the error if they fail."""
    try:
        enter_namespaces()
        kernel.mount("tmpfs", "/run", "tmpfs")
    except OSError as error:
        print(namespace_error(error))
    return 0


def _namespace_remedy() -> str:
    if os.geteuid() == 0:
        return "in a container: start it with --privileged (or --cap-add SYS_ADMIN,NET_ADMIN)"
    switch = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if switch.exists() and switch.read_text().strip() == "1":
        return "run it with sudo, or: sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    return "run it with sudo"
