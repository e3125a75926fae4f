"""OpenSSH as we call it: the command line, and what its refusals mean. Pure."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from paceline.spec.command import shell_text
from paceline.spec.hosts import Host

CONNECT_TIMEOUT_S = 10
SSH_FAILED = 255  # its own exit status; every other is that of the command there
BOOT_S = 120
"""How long an agent's process waits for its first word: a connection may have ended untold."""
# One POSIX line without single quotes, exclamation marks or newlines: any login shell passes it on.
_FIND_PYTHON = (
    'for p in "$@"; do if command -v "$p" >/dev/null 2>&1; then '
    'exec "$p" -I -c "import select;import sys;exec(sys.stdin.buffer.raw.readline()'
    f'if select.select([0],[],[],{BOOT_S})[0]else str())" "$p"; fi; done; '
    "echo paceline-boot: no Python: tried $* >&2; exit 127"
)
FALLBACK_PYTHONS = ("python3", "/usr/bin/python3", "/usr/local/bin/python3")


def agent_command(python: str) -> list[str]:
    """Starts the agent with ``python``, or with any Python there is, to say what is wrong."""
    return ["/bin/sh", "-c", _FIND_PYTHON, "paceline", python, *FALLBACK_PYTHONS]


@dataclass(frozen=True, slots=True)
class SshOptions:
    """How to call ssh.

    Attributes:
        config: ssh config file instead of the user's; ``None`` for the user's.
        accept_new_host_keys: Pin the key of a host that is met for the first time.
    """

    config: Path | None = None
    accept_new_host_keys: bool = False


def ssh_command(host: Host, options: SshOptions, remote: list[str], control: str | None = None,
                more: Mapping[str, str] = MappingProxyType({}),
                flags: Sequence[str] = ()) -> list[str]:  # fmt: skip
    """The ssh call that runs ``remote`` on ``host``: no prompt, no forwarding, keys pinned.

    Args:
        host, options: Where, and how to log in.
        remote: The command; none for a call that only is about the connection.
        control: Where a connection that is kept may be found, by which no login is needed.
        more: Further settings, which go before ours.
        flags: Further flags.
    """
    checking = "accept-new" if options.accept_new_host_keys else "yes"
    settings = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": checking,
        "UpdateHostKeys": "no",  # what is pinned changes when somebody says so, not by itself
        "ConnectTimeout": str(CONNECT_TIMEOUT_S),
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "PermitLocalCommand": "no",
        "ClearAllForwardings": "yes",
        "ControlMaster": "no",  # the agent's frames are the multiplexing: one login a host
        "ControlPath": control or "none",
        "RequestTTY": "no",
        **more,
    }
    argv = ["ssh", *(["-F", str(options.config)] if options.config else [])]
    for name, value in settings.items():
        argv += ["-o", f"{name}={value}"]
    if options.accept_new_host_keys:
        argv += ["-v"]  # only then does ssh tell the fingerprint that it pins
    argv += flags
    argv += ["-l", host.user] if host.user else []
    argv += ["-p", str(host.port)] if host.port else []
    argv += ["-i", host.identity_file] if host.identity_file else []
    return [*argv, "--", host.address, *([shell_text(remote)] if remote else [])]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a login failed.

    Attributes:
        cause: One of the names in ``CAUSES``; the key by which refusals are sorted.
        found: What ssh said, cleaned.
        remedy: What to type; ``{host}`` is filled in.
        passing: True when the same call may succeed a moment later.
    """

    cause: str
    found: str
    remedy: str
    passing: bool = False


@dataclass(frozen=True, slots=True)
class _Cause:
    name: str
    pattern: str
    remedy: str
    passing: bool = False


CAUSES: tuple[_Cause, ...] = (
    _Cause(
        "no room for the agent",
        r"paceline-boot: no room",
        "Its files, about a MiB, can be written neither below ~/.cache nor to a temporary folder "
        "of that user on {name}: df -h ~ /tmp there, and quota -s",
    ),
    _Cause(
        "host key changed",
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .{1,300} has changed",
        "If the machine was reinstalled, check its fingerprint there "
        "(ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub), then: ssh-keygen -R {known}{file}",
    ),
    _Cause(
        "host key not known",
        r"Host key verification failed|No .{1,100} host key is known",
        "Compare the fingerprint with the machine's own "
        "(ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub there); if equal, add "
        "--accept-new-host-keys to this command once",
    ),
    _Cause(
        "name not found",
        r"Could not resolve hostname|Name or service not known|nodename nor servname",
        "Check the spelling, or give its address: in ~/.ssh/config, `Host {name}` and "
        "`HostName ADDRESS`",
    ),
    _Cause(
        "no route",
        r"No route to host|Network is unreachable",
        "The machine is off or not in this network: ping {name}; ip route get ADDRESS",
    ),
    _Cause(
        "refused",
        r"Connection refused",
        "Nothing listens there: start sshd on {name} (sudo systemctl start ssh), or set its port "
        "(`Port N` in ~/.ssh/config)",
    ),
    _Cause(
        "sshd does not speak",
        r"timed out during banner exchange",
        "The machine's kernel answers but its sshd does not: it is frozen, out of memory or badly "
        "overloaded. Look at its console (uptime, free -h), or restart {name}",
    ),
    _Cause(
        "no answer",
        r"Connection timed out|Operation timed out",
        "The machine is off, or a firewall drops TCP to its SSH port: nc -vz {name} 22",
    ),
    _Cause(
        "the ssh config's proxy fails",
        r"(?:not found|No such file or directory|[Pp]ermission denied|cannot execute)"
        r"[^\n]{0,200}\n(?:[^\n]{0,300}\n)?[^\n]{0,100}"
        r"(?:UNKNOWN port 65535|proxy dialer did not pass back)",
        "Its ProxyCommand or ProxyJump fails as the words above say. Which one it is: "
        "ssh -G {name} | grep -i ^proxy, with -F FILE for another config",
    ),
    _Cause(
        "too many logins at once",
        r"kex_exchange_identification|banner exchange|Connection reset by|Connection closed by",
        "sshd on {name} drops connections (MaxStartups): raise MaxStartups in its sshd_config",
        passing=True,
    ),
    _Cause(
        "the session ended",
        r"Connection to .{1,300} closed by remote host|Broken pipe",
        "Its sshd ended the session before an agent answered: journalctl -u ssh on {name}",
        passing=True,
    ),
    _Cause(
        "private key is open to others",
        r"UNPROTECTED PRIVATE KEY FILE|bad permissions",
        "chmod 600 on the key file named above",
    ),
    _Cause(
        "too many keys offered",
        r"Too many authentication failures",
        "Name the key: `IdentityFile KEY` and `IdentitiesOnly yes` for {name} in ~/.ssh/config",
    ),
    _Cause(
        "login refused",
        r"Permission denied",
        "Put your public key there: ssh-copy-id {target} (and check the user's name). If it is "
        "there, its folders are open to others: chmod go-w ~ ~/.ssh ~/.ssh/authorized_keys",
    ),
    _Cause(
        "no Python",
        r"paceline-boot: no Python",
        "Install Python 3.9 or newer on {name}, or name one: "
        'python = "/path/to/python" under [hosts.{name}] in paceline.toml',
    ),
    _Cause(
        "not Linux",
        r"paceline-boot: not Linux",
        "A job's processes run on Linux only; paceline itself may be typed elsewhere. Name Linux "
        "hosts: -H n1,n2",
    ),
    _Cause(
        "login shell fails",
        r"This account is currently not available|/sbin/nologin|No such file or directory",
        "The login shell of that user does not run commands: chsh -s /bin/sh USER on {name}",
    ),
)


def classify(stderr: str, status: int | None, host: Host) -> Refusal:
    """What ssh's words mean.

    Args:
        stderr: Everything ssh wrote.
        status: Its exit status, ``None`` while unknown.
        host: Whom it was called for.
    """
    text = clean(stderr)
    for cause in CAUSES:
        if re.search(cause.pattern, text):
            remedy = _fill(cause.remedy, host, text)
            return Refusal(cause.name, _essence(text), remedy, cause.passing)
    return Refusal(
        "ended without an answer",
        text or f"ssh ended with status {status} and said nothing",
        f"Try by hand: ssh -v {_target(host)} true",
    )


def clean(stderr: str) -> str:
    """ssh's words without debug lines and decoration."""
    lines = (line.strip() for line in stderr.replace("\r", "").splitlines())
    kept = [line for line in lines if line and not line.startswith(("debug1:", "@"))]
    kept = [line for line in kept if not re.match(r"OpenSSH_|Authenticated to|Transferred:", line)]
    return "\n".join(kept)


def _essence(text: str) -> str:
    lines = [
        re.sub("^paceline-boot: (not Linux: |no room: )?", "", line) for line in text.splitlines()
    ]
    return "\n".join(lines if len(lines) <= 12 else [*lines[:4], "…", *lines[-7:]])


def _fill(remedy: str, host: Host, text: str) -> str:
    offending = offending_line(text)
    known = re.search(r"Host key for (\S{1,300}) has changed", text)  # as the file calls it
    values = {
        "name": host.name,
        "target": _target(host),
        "known": shell_text([known.group(1) if known else host.address]),
        "file": f" -f {shell_text([offending[0]])}" if offending else "",
    }
    return re.sub(r"\{(name|target|known|file)\}", lambda match: values[match.group(1)], remedy)


def offending_line(text: str) -> tuple[str, int] | None:
    """File and line (from 1) of the pinned key that a changed host key offends."""
    match = re.search(r"Offending \S{1,50} key in (.{1,1000}):(\d{1,9})", text)
    return (match.group(1), int(match.group(2))) if match else None


def fingerprint(line: str) -> str | None:
    """``ssh-ed25519 SHA256:…`` of a line of known_hosts; ``None`` when it holds no key."""
    match = re.search(r"(ssh-\S{1,100}|ecdsa-\S{1,100}|sk-\S{1,100}) (\S+)", line)
    if match is None:
        return None
    try:
        raw = base64.b64decode(match.group(2), validate=True)
    except ValueError:
        return None
    digest = base64.b64encode(hashlib.sha256(raw).digest()).decode().rstrip("=")
    return f"{match.group(1)} SHA256:{digest}"


def _target(host: Host) -> str:
    user = f"{host.user}@" if host.user else ""
    port = f"-p {host.port} " if host.port else ""
    return f"{port}{user}{host.address}"


def pinned_key(stderr: str) -> str | None:
    """The fingerprint that ``ssh -v`` showed: ``ssh-ed25519 SHA256:…``."""
    match = re.search(r"Server host key: (\S{1,100} \S+)", stderr)
    return match.group(1) if match else None


def newly_pinned(stderr: str) -> bool:
    """True when this call pinned the host's key for the first time."""
    return "Permanently added" in stderr
