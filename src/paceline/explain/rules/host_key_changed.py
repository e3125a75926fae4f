"""A host shows another key, or an unknown one.

Meaning: SSH refused to talk to a host whose key it does not know or that changed.
Cause: The machine was reinstalled, its address was given to another, or it was never met; in
    the worst case somebody is in between.
Confirm: Compare with the machine's own: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub
    there.
Remedy: When the fingerprint is right: ssh-keygen -R HOST, then paceline setup -H HOSTS pins
    the new key. Never turn the checking off.
Source: OpenSSH's messages.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "host-key-changed",
    __doc__,
    [
        "(?P<words>REMOTE HOST IDENTIFICATION HAS CHANGED)",
        "(?P<words>Host key verification failed)",
    ],
    "SSH does not trust a host: {words}",
    confidence=0.98,
)
