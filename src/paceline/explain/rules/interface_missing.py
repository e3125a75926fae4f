"""The named network interface does not exist there.

Meaning: A library was told to use an interface that the host does not have.
Cause: One value of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME was given to hosts with different
    interface names, or is misspelt.
Confirm: ip -br addr on every host; printenv | grep IFNAME.
Remedy: Leave the variable out: paceline run sets it per node. Or interface = "NAME" under
    [hosts.NAME] in paceline.toml.
Source: nccl 286, horovod 994, 2431 and 2568.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "interface-missing",
    __doc__,
    [
        r"Unable to find address for: (?P<name>\S+)",
        r"Unable to find interface for: (?P<name>\S+)",
        "Bootstrap : no socket interface found",
        "NCCL WARN.{0,300}no (?:socket )?interface found",
    ],
    "{where}: there is no usable network interface {name}",
    confidence=0.97,
)
