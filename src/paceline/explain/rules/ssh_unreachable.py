"""SSH does not reach a host.

Meaning: The connection to the SSH server failed before any login.
Cause: The machine is off, in another network, its sshd does not run, or a firewall drops the
    port.
Confirm: ping HOST; nc -vz HOST 22.
Remedy: Start the machine or its sshd (sudo systemctl start ssh), correct address and port in
    ~/.ssh/config; paceline check tells the cases apart for all hosts at once.
Source: DeepSpeed 4907, 6875 and 4116.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "ssh-unreachable",
    __doc__,
    [
        r"ssh: connect to host (?P<host>\S{1,300}) port (?P<port>\d{1,9}): (?P<words>.+)",
        "ssh: Could not resolve hostname (?P<host>[^:]{1,300}): (?P<words>.+)",
    ],
    "SSH does not reach {host}: {words}",
    confidence=0.97,
)
