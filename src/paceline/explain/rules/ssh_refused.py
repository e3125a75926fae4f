"""SSH refuses the login.

Meaning: The SSH server answered and did not let us in.
Cause: The key is not installed there, belongs to another user, or file permissions are too
    open.
Confirm: ssh -v HOST true: which keys are offered, which user?
Remedy: paceline setup -H HOSTS installs the key with the right permissions; User and
    IdentityFile belong into ~/.ssh/config.
Source: DeepSpeed 4907, volcano 2952.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "ssh-refused",
    __doc__,
    [
        r"(?P<who>[^\s@]{1,100}@[^\s@]{1,300}): Permission denied \((?P<words>[^)]{0,300})\)",
        "(?P<words>Too many authentication failures)",
        "(?P<words>UNPROTECTED PRIVATE KEY FILE)",
    ],
    "SSH refuses the login to {who} ({words})",
    confidence=0.97,
)
