"""Builds ssh command lines and classifies login failures. Pure."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from paceline.spec.formatting import closest_match, shell_text
from paceline.spec.hosts import Host

CONNECT_TIMEOUT_S = 10
SSH_FAILED = 255  # ssh's own exit status; any other is the remote command's
BOOT_TIMEOUT_S = 120
"""Seconds in which an agent's process must get its code: a connection may end unnoticed."""
GUARD_LINE = b'exec /bin/sh -c "echo paceline-boot: another shell >&2; exit 3"\n'
"""Sent before the agent's code. If a start-up file has replaced the login shell by one that reads
commands from standard input, that shell runs this line and exits. Python skips it."""
# One POSIX line without single quotes, exclamation marks or newlines: any login shell passes it on.
_READ_CODE = (
    "import select,sys;r=sys.stdin.buffer.raw.readline;"
    f"select.select([0],[],[],{BOOT_TIMEOUT_S})[0] or sys.exit();"
    r"l=r();l=r() if l[:6]==b\"exec /\" else l;"
    r"exec(l) if l[:5]==b\"exec(\" else sys.exit(\"paceline-boot: input\")"
)
_FIND_PYTHON = (
    'for p in "$@"; do if command -v "$p" >/dev/null 2>&1; then '
    f'exec "$p" -I -c "{_READ_CODE}" "$p"; fi; done; '
    "echo paceline-boot: no Python: tried $* >&2; exit 127"
)
NO_ANSWER, UNEXPECTED_COMMAND = "ended without an answer", "another command ran"
SILENT = "no answer at all"
FALLBACK_PYTHONS = ("python3", "/usr/bin/python3", "/usr/local/bin/python3")


BATCH_SETTINGS = {
    "LogLevel": "INFO",  # with less, ssh does not say why it fails
    "VisualHostKey": "no",
    "AddKeysToAgent": "no",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "Tunnel": "no",
    "ClearAllForwardings": "yes",
}
"""Settings of non-interactive logins, which take precedence over the user's ssh config."""


def agent_command(python: str) -> list[str]:
    """The command that starts the agent with ``python``, else with any Python there is."""
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
                extra_settings: Mapping[str, str] = MappingProxyType({}),
                flags: Sequence[str] = ()) -> list[str]:  # fmt: skip
    """The ssh command that runs ``remote`` on ``host``: no prompt, no forwarding, pinned keys.

    Args:
        host, options: The host, and how to log in.
        remote: The remote command; may be empty for control commands.
        control: Control socket of a shared connection, if there is one.
        extra_settings, flags: Settings that override the defaults, and further flags.
    """
    checking = "accept-new" if options.accept_new_host_keys else "yes"
    settings = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": checking,
        "UpdateHostKeys": "no",  # a pinned key changes only on request
        "ConnectTimeout": str(CONNECT_TIMEOUT_S),
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        **BATCH_SETTINGS,
        "ControlMaster": "no",  # the agent's frames are the multiplexing: one login a host
        "ControlPath": control or "none",
        **extra_settings,
    }
    argv = ["ssh", *(["-F", str(options.config)] if options.config else [])]
    for name, value in settings.items():
        argv += ["-o", f"{name}={value}"]
    if options.accept_new_host_keys:
        argv += ["-v"]  # ssh prints the fingerprint only then
    argv += [*flags, *login_flags(host)]
    # A login shell that stayed would keep the connection of an agent open that waits for later use.
    return [*argv, "--", host.address, *([f"exec {shell_text(remote)}"] if remote else [])]


def login_flags(host: Host) -> list[str]:
    """Returns ssh's flags for the user, port and key of a host, as far as they are given."""
    flags = {"-l": host.user, "-p": host.port, "-i": host.identity_file}
    return [word for flag, value in flags.items() if value for word in (flag, str(value))]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a login failed.

    Attributes:
        cause: One of the names in ``CAUSES``; refusals are sorted by it.
        details: ssh's messages, without decoration.
        remedy: What to do about it.
        is_transient: The same call may succeed a moment later.
    """

    cause: str
    details: str
    remedy: str
    is_transient: bool = False


@dataclass(frozen=True, slots=True)
class _Cause:
    name: str
    pattern: str
    remedy: str
    is_transient: bool = False


_GUARD = "case $- in *i*) ;; *) return ;; esac"  # of bash and zsh
CAUSES: tuple[_Cause, ...] = (
    _Cause(
        "no room for the agent",
        r"paceline-boot: no room",
        "Its files, about a MiB, can be written neither below ~/.cache nor to a temporary folder "
        "of that user on {name}: df -h ~ /tmp there, and quota -s",
    ),
    _Cause(
        "its start-up file starts another shell",
        r"paceline-boot: another shell|(?:^|\n)fish: ",  # which reads all its input first
        "A start-up file of that user on {name} (~/.bashrc, ~/.zshenv, ~/.tcshrc) replaces the "
        f"shell in every login (exec fish). Put this line above it: {_GUARD}",
    ),
    _Cause(
        "its start-up file reads standard input",
        r"paceline-boot: input",
        "A start-up file of that user on {name} (~/.bashrc, ~/.zshenv) runs a command that reads "
        f"standard input, such as `read` or `ssh`. Put this line above it: {_GUARD}. Or the ssh "
        "config sets StdinNull: ssh -G {target} | grep -i stdinnull",
    ),
    _Cause(
        "no Python",
        r"paceline-boot: no Python|Unknown option: -I\s+usage: ",  # the second by Python 2
        "Install Python 3.9 or newer on {name}, or name one: "
        'python = "/path/to/python" under [hosts.{name}] in paceline.toml',
    ),
    _Cause(
        "Python fails there",
        r"paceline-boot: broken Python|error while loading shared libraries|symbol lookup error|"
        r"Fatal Python error",
        "Python on {name} cannot load its own parts. See what the login there sets: "
        "env | grep -E '^(LD_|PYTHON)'; remove it from the start-up file, or name another "
        'interpreter: python = "/path/to/python" under [hosts.{name}] in paceline.toml',
    ),
    _Cause(
        "not Linux",
        r"paceline-boot: not Linux",
        "A job's processes run on Linux only; paceline itself may be typed elsewhere. Name Linux "
        "hosts: -H n1,n2",
    ),
    _Cause(
        "the ssh config's proxy fails",
        r"(?:^|\n)(?!kex_exchange|ssh_exchange|Connection |banner exchange|mm_receive_fd|"
        r"ssh: connect to host [^\n]{1,300}\nmm_receive_fd)[^\n]{1,300}"  # a lab's own answer
        r"\n(?:[^\n]{0,300}\n){0,2}?[^\n]{0,100}"
        r"(?:UNKNOWN port 65535|proxy dialer did not pass back)|stdio forwarding failed",
        "The login to its jump host, or its ProxyCommand, fails as the words above say. "
        "ssh -G {name} | grep -i ^proxy (with -F FILE for another config) names the ProxyJump or "
        "ProxyCommand: try that by hand",
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
        "only old host keys",
        r"no matching host key type found",
        "Its sshd offers only key types that ssh no longer takes. Renew its keys (ssh-keygen -A "
        "on {name}), or allow them in ~/.ssh/config: `Host {name}`, `HostKeyAlgorithms +{offer}`, "
        "`PubkeyAcceptedAlgorithms +{offer}`",
    ),
    _Cause(
        "no common algorithm",
        r"Unable to negotiate with|no matching .{1,40} found|"
        r"ssh_dispatch_run_fatal.{1,200}error in libcrypto",
        "sshd on {name} is much older or newer than this ssh: update the older of the two, or "
        "allow what it offers in ~/.ssh/config under `Host {name}`: `KexAlgorithms +{offer}` for a "
        "key exchange method, `Ciphers +{offer}` for a cipher, `MACs +{offer}` for a MAC",
    ),
    _Cause(
        "host key too short",
        r"Invalid key length",
        "Renew the keys of its sshd (ssh-keygen -A on {name}), or allow short ones in "
        "~/.ssh/config: `Host {name}`, `RequiredRSASize 1024`",
    ),
    _Cause(
        "the ssh config is wrong",
        r"(?:config|command-line)\S{0,100} line \d+: |Bad configuration option|"
        r"Bad owner or permissions on|Can't open user config file|Bad port '",
        "Correct the file and the line that the words above name; if its permissions are the "
        "matter: chmod 600 FILE",
    ),
    _Cause(
        "name not found",
        r"Could not resolve hostname|Name or service not known|nodename nor servname",
        "Check the spelling, or give its address: in ~/.ssh/config, `Host {name}` and "
        "`HostName ADDRESS`",
    ),
    _Cause(
        "no route",
        r"No route to host|Network is unreachable|Host is down",
        "The machine is off or not in this network: ping {name}; ip route get {address}",
    ),
    _Cause(
        "refused",
        r"Connection refused",
        "Nothing listens there: start sshd on {name} (sudo systemctl start ssh), or {port_setting}",
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
        "The machine is off, or a firewall drops TCP to its SSH port: nc -vz {name} {port}",
    ),
    _Cause(
        "no job on this host",
        r"pam_slurm|no active jobs on this node",
        "Slurm lets you in only while a job of yours runs there: salloc -N 2 (or -w {name}), then "
        "type this command inside the allocation, with -H slurm or --via slurm",
    ),
    _Cause(
        "account expired",
        r"[Aa]ccount (?:(?:has|is|was) )?(?:been )?(?:expired|locked|disabled)",
        "Have the administrator of {name} renew the account: sudo chage -l USER shows the date",
    ),
    _Cause(
        "password expired",
        r"[Pp]assword (?:has |is )?expired|[Pp]assword change required|change your password",
        "Log in by hand once and choose a new password: ssh {target}",
    ),
    _Cause(
        "logins are closed",
        r"System (?:is )?(?:going down|booting up)|nologin\(5\)|/etc/nologin|[Ll]ogins? (?:is|are) "
        r"(?:currently |temporarily )?(?:disabled|closed|not (?:allowed|permitted))|"
        r"nprivileged users are not permitted",
        "{name} takes no logins now (maintenance, or it starts): wait, or leave it out. If "
        "it was forgotten, its administrator removes /etc/nologin and /run/nologin",
    ),
    _Cause(
        "too many sessions",
        r"[Tt]oo many logins for|There were too many logins|Session open refused|"
        r"mux_client_request_session",
        "Your user has as many sessions on {name} as are allowed there: end some (who), or raise "
        "maxlogins (/etc/security/limits.conf) or MaxSessions (sshd_config)",
    ),
    _Cause(
        "this machine is barred",
        r"Not allowed at this time|Exceeded MaxStartups",
        "sshd on {name} bars this address for a while after failed logins "
        "(PerSourcePenalties): wait some minutes, and do not repeat the command before",
    ),
    _Cause(
        "private key is open to others",
        r"UNPROTECTED PRIVATE KEY FILE|bad permissions",
        "chmod 600 on the key file named above",
    ),
    _Cause(
        "private key cannot be read",
        r"Load key .{1,300}: |Identity file \S{1,300} not accessible|no such identity: ",
        "The key file named above is missing or no private key of OpenSSH (a public key, or "
        "Windows line ends): ssh-keygen -yf FILE must print its public half",
    ),
    _Cause(
        "the ssh agent refuses to sign",
        r"agent refused operation|signing failed for",
        "The agent holds the key but may not use it (locked, a token that waits for a touch, an "
        "expired key): ssh-add -D, then ssh-add KEYFILE; or without it: `IdentityAgent none` for "
        "{name} in ~/.ssh/config",
    ),
    _Cause(
        "key type not accepted",
        r"no mutual signature|not in PubkeyAccepted",
        "Its sshd is too old for this kind of key. Make another one (ssh-keygen -t ed25519) and "
        "put it there (ssh-copy-id {target}), or set `PubkeyAcceptedAlgorithms +ssh-rsa` for "
        "{name} in ~/.ssh/config",
    ),
    _Cause(
        "certificate expired",
        r"[Cc]ertificate (?:invalid|(?:has |is )?expired)",
        "Get a new certificate as your site says; ssh-keygen -Lf KEY-cert.pub shows its dates",
    ),
    _Cause(
        "too many keys offered",
        r"Too many authentication failures",
        "Name the key: `IdentityFile KEY` and `IdentitiesOnly yes` for {name} in ~/.ssh/config",
    ),
    _Cause(
        "a password or a code is asked for",
        r"Permission denied \((?:password|keyboard-interactive)"
        r"(?:,(?:password|keyboard-interactive))*\)",
        "sshd on {name} wants what only a person can type. Have it accept a key alone, or start "
        "the job from inside: in an allocation of the batch system, or with --rdzv on each node",
    ),
    _Cause(
        "login refused",
        r"Permission denied(?: \(|,|\.)|No more authentication methods",
        "Put your public key there: ssh-copy-id {target} (and check the user's name). If it is "
        "there, its folders are open to others: chmod go-w ~ ~/.ssh ~/.ssh/authorized_keys. If the "
        "key has a passphrase: ssh-add. If no key works: the login shell may be missing there "
        "(getent passwd USER)",
    ),
    _Cause(
        "no room for a process",
        r"request failed on channel|fork: .{0,60}(?:temporarily unavailable|Cannot allocate)",
        "Your user has as many processes on {name} as are allowed, or its memory is full: "
        "ps -u $USER | wc -l and ulimit -u there, free -h",
    ),
    _Cause(
        "its home folder is missing",
        r"Could not chdir to home directory",
        "The home of that user on {name} does not exist or is closed to it: ls -ld ~ there "
        "(a file system that is not mounted?)",
    ),
    _Cause(
        "its start-up file needs a terminal",
        r"not a terminal|Must be connected to a terminal|no tty present",
        "A start-up file of that user on {name} (~/.bashrc, ~/.zshenv) starts a program for "
        f"terminals in every login (tmux, screen). Put this line above it: {_GUARD}",
    ),
    _Cause(
        "login shell fails",
        r"account is currently not available|/sbin/nologin|No such file or directory|"
        r": restricted|[Ii]nteractive git shell|allows sftp connections only",
        "The login shell of that user does not run commands: chsh -s /bin/sh USER on {name}",
    ),
    _Cause(
        "dropped before the login",
        r"kex_exchange_identification|banner exchange|Connection reset by|Connection closed by",
        "sshd on {name} drops connections. Its log says why: journalctl -u ssh there. Too many "
        "logins at once: raise MaxStartups in its sshd_config. This address is barred: fail2ban or "
        "/etc/hosts.deny",
        is_transient=True,
    ),
    _Cause(
        "the session ended",
        r"Connection to .{1,300} closed by remote host|Broken pipe|"
        r"Received disconnect from|Disconnected from",
        "Its sshd ended the session before an agent answered: journalctl -u ssh on {name}",
        is_transient=True,
    ),
)
_SSH_LINES = re.compile(
    r"kex_exchange|ssh_exchange|ssh_dispatch|banner exchange|client_loop|packet_write|Connection |"
    r"Disconnected from|Timeout, server|Read from|Write failed|Warning: Permanently|\*\* |"
    r"Pseudo-terminal|Killed by signal"
)
"""Lines of ssh about the end of a connection; any other line has the host's reason."""


def classify(stderr: str, status: int | None, host: Host, printed: str = "",
             config: Path | None = None) -> Refusal:  # fmt: skip
    """Classifies a failed login to ``host``.

    Args:
        stderr, status: Standard error and exit status of ssh; ``None`` if unknown.
        printed: Standard output, if it was not an agent's.
        config: ssh config file of the login; ``None`` for the user's.
    """
    stderr_text, stdout_text = clean(stderr), clean(printed)
    text = "\n".join(part for part in (stderr_text, stdout_text) if part)
    target = _target(host, text, config)
    for cause in CAUSES:
        if not re.search(cause.pattern, text):
            continue
        reason = [line for line in text.splitlines() if not _SSH_LINES.match(line)]
        if cause.is_transient and reason:
            return Refusal(
                "the host refused",
                _summary(text),
                f"{host.name} ended the connection, and the words above say why. If they do not, "
                f"its log does: journalctl -u ssh there. By hand: ssh -v {target} true",
            )
        remedy = _fill(cause.remedy, host, text, target)
        if cause.name == "name not found" and closest_match(host.name, ["lab"]):
            remedy += "; for the virtual cluster, type -H lab"
        return Refusal(cause.name, _summary(text), remedy, cause.is_transient)
    if status not in (None, SSH_FAILED):
        return Refusal(
            UNEXPECTED_COMMAND,
            f"ssh ended with status {status} before our command ran, and "
            + (f"printed: {_summary(text)}" if text else "said nothing"),
            f"A start-up file of that user on {host.name} ends the shell (exit in ~/.bashrc), or "
            f"its sshd runs another command (ForceCommand, command= in authorized_keys). By hand: "
            f"ssh {target} echo reached",
        )
    return Refusal(
        NO_ANSWER,
        _summary(text) or f"ssh ended with status {status} and said nothing",
        f"Try by hand: ssh -v {target} true",
    )


def clean(stderr: str) -> str:
    """ssh's messages without debug lines and decoration."""
    lines = (line.strip() for line in stderr.replace("\r", "").splitlines())
    skipped = re.compile(r"debug1:|@|OpenSSH_|Authenticated to|Transferred:|$")
    return "\n".join(line for line in lines if not skipped.match(line))


def _summary(text: str) -> str:
    lines = [
        re.sub("^paceline-boot: (not Linux: |no room: |broken Python: )?", "", line)
        for line in text.splitlines()
        if not re.fullmatch("paceline-boot: (another shell|input)", line)
    ]
    return "\n".join(lines if len(lines) <= 12 else [*lines[:4], "…", *lines[-7:]])


_OFFER = re.compile(r"Their offer: ([\w@.-]{1,100})")


def _fill(remedy: str, host: Host, text: str, target: str) -> str:
    offending = offending_line(text)
    key_name = re.search(r"Host key for (\S{1,300}) has changed", text)  # as known_hosts calls it
    port_setting = "set its port (`Port N` in ~/.ssh/config)"
    if host.port is not None:
        port_setting = f"correct its port, {host.port}, in the host file or wherever you list it"
    values = {
        "name": host.name,
        "port": str(host.port or 22),
        "port_setting": port_setting,
        "address": _address(host, text),
        "target": target,
        "known": shell_text([key_name.group(1) if key_name else host.address]),
        "file": f" -f {shell_text([offending[0]])}" if offending else "",
        "offer": offer.group(1) if (offer := _OFFER.search(text)) else "ALGORITHM",
    }
    return re.sub(
        r"\{(name|address|target|known|file|offer|port|port_setting)\}",
        lambda match: values[match.group(1)],
        remedy,
    )


def _address(host: Host, text: str) -> str:
    """The IP address that ssh has tried; ``ADDRESS`` if only a name is known."""
    tried = re.search(r"connect to host (\S{1,300}) port", text)
    for address in (tried.group(1) if tried else "", host.address):
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(address))
    return "ADDRESS"


def offending_line(text: str) -> tuple[str, int] | None:
    """File and line (from 1) of the pinned key that differs from the host's."""
    match = re.search(r"Offending \S{1,50} key in (.{1,1000}):(\d{1,9})", text)
    return (match.group(1), int(match.group(2))) if match else None


def fingerprint(line: str) -> str | None:
    """``ssh-ed25519 SHA256:…`` of a line of known_hosts; ``None`` if it has no key."""
    match = re.search(r"(ssh-\S{1,100}|ecdsa-\S{1,100}|sk-\S{1,100}) (\S+)", line)
    if match is None:
        return None
    try:
        raw = base64.b64decode(match.group(2), validate=True)
    except ValueError:
        return None
    digest = base64.b64encode(hashlib.sha256(raw).digest()).decode().rstrip("=")
    return f"{match.group(1)} SHA256:{digest}"


def _target(host: Host, text: str, config: Path | None) -> str:
    """Arguments of ssh and ssh-copy-id for the user whom ssh has tried, as it says."""
    tried = re.search(r"^([\w.-]{1,100})@\S{1,300}: Permission denied", text, re.MULTILINE)
    user = host.user or (tried.group(1) if tried else "")
    port = ["-p", str(host.port)] if host.port else []
    file = ["-F", str(config)] if config else []
    return shell_text([*file, *port, f"{user}@{host.address}" if user else host.address])


_JUMP_LINE = "debug1: Setting implicit ProxyCommand from ProxyJump: "  # of ``ssh -v``, for each


def server_fingerprint(stderr: str) -> str | None:
    """The host key's fingerprint in the output of ``ssh -v``: ``ssh-ed25519 SHA256:…``.

    Hosts on the way (ProxyJump) show theirs before. What the host itself prints comes later.
    """
    pattern = re.compile(r"^debug1: Server host key: (\S{1,100} \S+)", re.MULTILINE)
    keys = list(pattern.finditer(stderr))
    if not keys:
        return None
    num_jumps = stderr.count(_JUMP_LINE, 0, keys[0].start())
    return keys[num_jumps][1] if num_jumps < len(keys) else None


def was_key_pinned(stderr: str) -> bool:
    """Whether this call pinned the host's key for the first time."""
    return "Permanently added" in stderr
