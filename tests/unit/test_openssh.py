"""Tests ssh commands, and the meaning of error messages, which were recorded from OpenSSH 9.2."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from each_case import each_case
from paceline.remote import openssh
from paceline.remote.agent_code import agent_code
from paceline.remote.openssh import BOOT_TIMEOUT_S, SshOptions, agent_command, classify
from paceline.spec.hosts import Host

HOST = Host("n2", address="10.77.0.12", user="me", port=2222)
DOOR = "@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@\n"

CHANGED = f"""{DOOR}@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
{DOOR}IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Someone could be eavesdropping on you right now (man-in-the-middle attack)!
It is also possible that a host key has just been changed.
The fingerprint for the ED25519 key sent by the remote host is
SHA256:AkOOR2Wq1mrLYtyGXAy8Iw1FQO4u2DhLSk7Wtb4UJDU.
Please contact your system administrator.
Add correct host key in /home/me/.ssh/known_hosts to get rid of this message.
Offending ED25519 key in /home/me/.ssh/known_hosts:2
  remove with:
  ssh-keygen -f "/home/me/.ssh/known_hosts" -R "[10.77.0.12]:2222"
Host key for [10.77.0.12]:2222 has changed and you have requested strict checking.
Host key verification failed.
"""
OPEN_KEY = f"""{DOOR}@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @
{DOOR}Permissions 0644 for '/home/me/.ssh/id' are too open.
This private key will be ignored.
Load key "/home/me/.ssh/id": bad permissions
me@10.77.0.12: Permission denied (publickey).
"""

RECORDED = [
    (CHANGED, "host key changed", "ssh-keygen -R '[10.77.0.12]:2222' -f /home/me/.ssh/known_hosts"),
    ("No ED25519 host key is known for 10.77.0.12 and you have requested strict checking.\n"
     "Host key verification failed.\n", "host key not known", "--accept-new-host-keys"),
    ("ssh: Could not resolve hostname nope: Name or service not known\r\n",
     "name not found", "HostName"),
    ("ssh: connect to host n2 port 22: No route to host\r\n", "no route", "ping n2"),
    ("ssh: connect to host n2 port 22: Network is unreachable\r\n", "no route", "ping n2"),
    ("ssh: connect to host n2 port 22: Connection refused\r\n", "refused", "start sshd on n2"),
    ("ssh: connect to host n2 port 22: Connection timed out\r\n", "no answer", "firewall"),
    ("Connection timed out during banner exchange\r\nConnection to 10.0.0.1 port 22 timed out\n",
     "sshd does not speak", "overloaded"),
    ("kex_exchange_identification: read: Connection reset by peer\r\n"
     "Connection reset by 10.77.0.12 port 22\r\n", "dropped before the login", "MaxStartups"),
    ("kex_exchange_identification: Connection closed by remote host\r\n"
     "Connection closed by 10.77.0.12 port 22\r\n", "dropped before the login", "MaxStartups"),
    ("/bin/sh: 1: exec: nc: not found\nkex_exchange_identification: Connection closed by remote "
     "host\r\nConnection closed by UNKNOWN port 65535\r\n",
     "the ssh config's proxy fails", "ssh -G n2"),
    ("/bin/bash: line 1: exec: nc: not found\n"
     "banner exchange: Connection to UNKNOWN port 65535: Broken pipe\r\n",
     "the ssh config's proxy fails", "ProxyCommand"),
    ("python3: can't open file '/no/such.py': [Errno 2] No such file or directory\n"
     "mm_receive_fd: recvmsg: expected received 1 got 0\n"
     "proxy dialer did not pass back a connection\n", "the ssh config's proxy fails", "ssh -G n2"),
    ("ssh: connect to host 10.77.0.12 port 22: No route to host\n"
     "mm_receive_fd: recvmsg: expected received 1 got 0\r\n"
     "proxy dialer did not pass back a connection\r\n", "no route", "ip route get 10.77.0.12"),
    ("me@jump: Permission denied (publickey).\r\nkex_exchange_identification: Connection closed by "
     "remote host\r\nConnection closed by UNKNOWN port 65535\r\n",
     "the ssh config's proxy fails", "ProxyJump"),
    ("kex_exchange_identification: Connection closed by remote host\r\n"
     "Connection closed by UNKNOWN port 65535\r\n", "dropped before the login", "MaxStartups"),
    (OPEN_KEY, "private key is open to others", "chmod 600"),
    ("Received disconnect from 10.77.0.12 port 22:2: Too many authentication failures\r\n"
     "Disconnected from 10.77.0.12 port 22\r\n", "too many keys offered", "IdentitiesOnly"),
    ("me@10.77.0.12: Permission denied (publickey,password).\r\n",
     "login refused", "ssh-copy-id -p 2222 me@10.77.0.12"),
    ("no such identity: /home/me/.ssh/cluster: No such file or directory\n"
     "me@10.77.0.12: Permission denied (publickey).\r\n",
     "private key cannot be read", "is missing"),
    ("paceline-boot: no Python: tried /py python3\n", "no Python", "[hosts.n2]"),
    ("Unknown option: -I\nusage: /usr/bin/python [option] ... [-c cmd | -m mod | file | -] [arg]\n",
     "no Python", "3.9 or newer"),
    ("This account is currently not available.\n", "login shell fails", "chsh"),
    ("Access denied by pam_slurm_adopt: you have no active jobs on this node\n"
     "Connection closed by 10.30.1.14 port 22\n", "no job on this host", "salloc"),
    ("Access denied: user me (uid=1) has no active jobs on this node.\n"
     "Connection closed by 10.30.1.14 port 22\n", "no job on this host", "-w n2"),
    ("Your account has expired; please contact your system administrator.\n"
     "Connection closed by 10.30.1.14 port 22\n", "account expired", "chage -l"),
    ("WARNING: Your password has expired.\nPassword change required but no TTY available.\n",
     "password expired", "ssh -p 2222 me@10.77.0.12"),
    ("You are required to change your password immediately (administrator enforced).\n",
     "password expired", "new password"),
    ("Unable to negotiate with 10.30.1.14 port 22: no matching host key type found. Their offer: "
     "ssh-rsa,ssh-dss\n", "only old host keys", "HostKeyAlgorithms +ssh-rsa`"),
    ("Unable to negotiate with 10.30.1.14 port 22: no matching key exchange method found. Their "
     "offer: diffie-hellman-group1-sha1\n", "no common algorithm",
     "KexAlgorithms +diffie-hellman-group1-sha1"),
    ("sign_and_send_pubkey: signing failed for ED25519 \"/home/u/.ssh/id_ed25519\" from agent: "
     "agent refused operation\nu@10.30.1.14: Permission denied (publickey).\n",
     "the ssh agent refuses to sign", "ssh-add"),
    ("System is booting up. Unprivileged users are not permitted to log in yet. Please come back "
     "later. For technical details, see pam_nologin(8).\nConnection closed by 10.0.0.4 port 22\n",
     "logins are closed", "/run/nologin"),
    ("Down for maintenance until Friday.\nConnection closed by 10.0.0.4 port 22\n",
     "the host refused", "journalctl"),
    ("Too many logins for 'me'.\nConnection to 10.0.0.4 closed by remote host.\n",
     "too many sessions", "maxlogins"),
    ("channel 0: open failed: administratively prohibited: open failed\nstdio forwarding failed\n"
     "Connection closed by UNKNOWN port 65535\n", "the ssh config's proxy fails", "ssh -G n2"),
    ("ssh: Could not resolve hostname gate: Name or service not known\n"
     "Connection closed by UNKNOWN port 65535\n", "the ssh config's proxy fails", "ProxyJump"),
    ("/home/me/.ssh/config: line 3: Bad configuration option: usekeychain\n"
     "/home/me/.ssh/config: terminating, 1 bad configuration options\n",
     "the ssh config is wrong", "the line"),
    ("Bad owner or permissions on /home/me/.ssh/config\n", "the ssh config is wrong", "chmod 600"),
    ("Load key \"/home/me/.ssh/id\": error in libcrypto\nme@n2: Permission denied (publickey).\n",
     "private key cannot be read", "ssh-keygen -yf"),
    ("kex_exchange_identification: banner line contains invalid characters\n"
     "Not allowed at this time\n", "this machine is barred", "PerSourcePenalties"),
    ("Received disconnect from 10.0.0.4 port 22:12: Closed by policy\n"
     "Disconnected from 10.0.0.4 port 22\n", "the host refused", "journalctl"),
    ("Account locked due to 12 failed logins\nConnection closed by 10.0.0.4 port 22\n",
     "account expired", "administrator"),
    ("command-line line 0: Bad yes/no argument\n", "the ssh config is wrong", "the line"),
    ("sign_and_send_pubkey: no mutual signature supported\nme@n2: Permission denied (publickey).\n",
     "key type not accepted", "ed25519"),
    ("Certificate invalid: expired\nme@n2: Permission denied (publickey).\n",
     "certificate expired", "ssh-keygen -Lf"),
    ("me@n2: Permission denied (keyboard-interactive).\n",
     "a password or a code is asked for", "--rdzv"),
    ("exec request failed on channel 0\n", "no room for a process", "ulimit -u"),
    ("Could not chdir to home directory /home/me: Permission denied\n",
     "its home folder is missing", "ls -ld ~"),
    ("paceline-boot: broken Python: /tmp/lib/libz.so.1: file too short\nLD_LIBRARY_PATH=/tmp/lib\n",
     "Python fails there", "env | grep"),
    ("/py: error while loading shared libraries: libpython3.11.so.1.0: cannot open shared object "
     "file: No such file or directory\n", "Python fails there", "env | grep"),
    ("paceline-boot: another shell\n", "its start-up file starts another shell", "case $- in"),
    ("paceline-boot: input\n", "its start-up file reads standard input", "StdinNull"),
    ("open terminal failed: not a terminal\n", "its start-up file needs a terminal", "tmux"),
]  # fmt: skip


@each_case(("words", "cause", "remedy"), RECORDED)
def test_classifies_recorded_ssh_errors(words: str, cause: str, remedy: str) -> None:
    result = classify("debug1: noise Permission denied\n" + words, 255, HOST)
    assert result.cause == cause
    assert remedy in result.remedy
    assert "{" not in result.remedy
    assert "debug1" not in result.details
    assert "@@@" not in result.details
    assert result.is_transient == (cause == "dropped before the login")


def test_remedy_of_refused_port_names_where_it_was_set() -> None:
    words = "ssh: connect to host n2 port 2222: Connection refused\n"
    assert classify(words, 255, HOST).remedy.endswith(
        "or correct its port, 2222, in the host file or wherever you list it"
    )
    assert "`Port N` in ~/.ssh/config" in classify(words, 255, Host("n2")).remedy
    words = "ssh: connect to host n2 port 2222: Connection timed out\n"
    assert classify(words, 255, HOST).remedy.endswith("nc -vz n2 2222")


def test_changed_host_key_details() -> None:
    result = classify(CHANGED, 255, HOST)
    assert "SHA256:AkOOR2Wq1mrLYtyGXAy8Iw1FQO4u2DhLSk7Wtb4UJDU" in result.details
    assert openssh.offending_line(result.details) == ("/home/me/.ssh/known_hosts", 2)


def test_classifies_unknown_error() -> None:
    result = classify("something new\n", 255, HOST)
    assert (result.cause, result.details) == ("ended without an answer", "something new")
    assert "ssh -v" in result.remedy
    assert "status 255" in classify("", 255, HOST).details


def test_fingerprint_has_openssh_format() -> None:
    key = "AAAAC3NzaC1lZDI1NTE5AAAAIDLlwDZUHU2fogldZ3MG1H75X9Smvu7ghfF9pVxwwQAB"
    expected = "ssh-ed25519 SHA256:"
    for line in (f"n1,10.0.0.1 ssh-ed25519 {key}", f"|1|a=|b= ssh-ed25519 {key} comment"):
        result = openssh.fingerprint(line)
        assert result is not None
        assert result.startswith(expected)
        assert len(result) == len(expected) + 43
    assert openssh.fingerprint("# nothing") is None
    assert openssh.fingerprint("n1 ssh-ed25519 !!!") is None


def test_ssh_command_options() -> None:
    argv = openssh.ssh_command(HOST, SshOptions(Path("/c")), ["a b", ";"])
    assert argv[0] == "ssh"
    assert argv[-3:] == ["--", "10.77.0.12", "exec 'a b' ';'"]
    options = " ".join(argv)
    for expected in ("-F /c", "BatchMode=yes", "StrictHostKeyChecking=yes", "ForwardAgent=no",
                   "-l me", "-p 2222", "ControlMaster=no", "RemoteCommand=none", "RequestTTY=no",
                   "LogLevel=INFO"):  # fmt: skip
        assert expected in options
    accepting = openssh.ssh_command(HOST, SshOptions(None, True), [])
    assert "StrictHostKeyChecking=accept-new" in accepting


def test_ssh_command_escapes_host_like_option() -> None:
    argv = openssh.ssh_command(Host("-oProxyCommand=evil"), SshOptions(), ["true"])
    assert argv[argv.index("--") + 1] == "-oProxyCommand=evil"


def test_boot_line_is_safe_in_all_shells() -> None:
    (_, _, line, *_rest) = openssh.agent_command("/py")
    assert not set("'!\n") & set(line)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("debug1: Server host key: ssh-ed25519 SHA256:abc\n", "ssh-ed25519 SHA256:abc"),
        (  # by way of a jump host
            "debug1: Setting implicit ProxyCommand from ProxyJump: ssh -v -W '[%h]:%p' jump\n"
            "debug1: Server host key: ssh-rsa SHA256:jump\nAuthenticated to jump\n"
            "debug1: Server host key: ssh-ed25519 SHA256:abc\n",
            "ssh-ed25519 SHA256:abc",
        ),
        (  # a banner of the host
            "debug1: Server host key: ssh-ed25519 SHA256:abc\n"
            "debug1: Server host key: ssh-ed25519 SHA256:forged\n",
            "ssh-ed25519 SHA256:abc",
        ),
        ("", None),
    ],
)
def test_server_fingerprint(words: str, key: str | None) -> None:
    assert openssh.server_fingerprint(words) == key


def test_agent_exits_without_input() -> None:
    """A firewall may cut the connection on the other side only; sshd would keep it for hours."""
    command = [
        word.replace(f"[],{BOOT_TIMEOUT_S}", "[],0.1") for word in agent_command(sys.executable)
    ]
    assert command != agent_command(sys.executable)
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        assert child.wait(30) == 0
    reply = subprocess.run(command, input=b"exec('print(7)')\n", capture_output=True, timeout=30)
    assert reply.stdout == b"7\n"


def test_reports_output_instead_of_agent() -> None:
    result = classify("", 0, HOST, "This host is for file transfer only\n")
    assert "This host is for file transfer only" in result.details
    assert "ForceCommand" in result.remedy
    assert not result.is_transient
    no_output = classify("", 3, HOST)
    assert "status 3" in no_output.details
    assert "exit" in no_output.remedy
    closed = classify("", 1, HOST, "This account is currently not available.\n")
    assert closed.cause == "login shell fails"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh", "dash", "ksh"])
def test_shell_started_by_profile_runs_no_agent_code(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    completed = subprocess.run(
        [shell], input=agent_code().first_line, capture_output=True, timeout=30
    )
    assert completed.stdout == b""
    result = classify(completed.stderr.decode(), completed.returncode, HOST)
    assert result.cause == "its start-up file starts another shell"


@pytest.mark.parametrize("num_consumed", [0, 1])
def test_agent_starts_if_profile_reads_line(num_consumed: int) -> None:
    lines = [openssh.GUARD_LINE, b"exec('print(7)')\n"]
    reply = subprocess.run(
        agent_command(sys.executable),
        input=b"".join(lines[num_consumed:]),
        capture_output=True,
        timeout=30,
    )
    assert reply.stdout == b"7\n"


def test_truncated_agent_code_is_not_run() -> None:
    reply = subprocess.run(
        agent_command(sys.executable), input=b"print(7)\n", capture_output=True, timeout=30
    )
    assert (reply.stdout, reply.stderr) == (b"", b"paceline-boot: input\n")


def test_suggests_lab_for_misspelled_name() -> None:
    reply = "ssh: Could not resolve hostname labb: Name or service not known"
    assert classify(reply, 255, Host("labb")).remedy.endswith(
        "; for the virtual cluster, type -H lab"
    )
    assert "virtual" not in classify(reply, 255, Host("node1")).remedy


def test_ssh_copy_id_remedy_names_rejected_user() -> None:
    text = "root@10.77.0.12: Permission denied (publickey).\n"
    result = classify(text, 255, Host("n2"), config=Path("/my lab/config"))
    assert "ssh-copy-id -F '/my lab/config' root@n2 (" in result.remedy
