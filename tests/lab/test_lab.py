"""Tests the lab with real namespaces, sshd and faults, and that nothing is left afterwards."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import launches
import pytest

import paceline.lab
from background import TIMEOUT_S, eventually
from paceline.hosts.lab import list_labs, parent_folder, read_owner
from paceline.lab import Lab, LabOptions
from paceline.lab import processes as lab_processes
from paceline.spec.errors import LabError

pytestmark = pytest.mark.lab


CONNECT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])) as s:
        print(s.recv(100).decode().strip())
except TimeoutError:
    print("timeout")
except OSError as error:
    print(error.errno)
"""

SERVE = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        connection.sendall(b"hello")
        connection.close()
"""

RECEIVE = """
import socket
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        size = int(connection.recv(16))
        while size > 0:
            size -= len(connection.recv(1 << 20))
        connection.sendall(b"k")
"""

SEND = """
import socket, sys, time
host, size = sys.argv[1], int(sys.argv[2])
with socket.create_connection((host, 7000)) as s:
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    began = time.perf_counter()
    s.sendall(b"%16d" % size)
    s.sendall(bytes(size))
    s.recv(1)
    print(time.perf_counter() - began)
"""


@pytest.fixture(scope="module", autouse=True)
def _require_lab() -> None:
    assert Lab.available() is None


@pytest.fixture(scope="module")
def pair() -> Iterator[Lab]:
    """Two hosts as Debian's installer sets them up, shared by tests that change nothing."""
    with Lab(LabOptions(hosts=2, debian_hosts=True)) as lab:
        yield lab
        assert [lab.processes(name) for name in lab.names] == [[], []]


@pytest.fixture
def healed(pair: Lab) -> Iterator[Lab]:
    """The two hosts of ``pair``, healed after each test that causes faults."""
    yield pair
    pair.heal()


def output(lab: Lab, host: str, *argv: str) -> str:
    return lab.exec(host, argv, timeout=2 * TIMEOUT_S, check=True).stdout.strip()


def ssh(lab: Lab, host: str, *words: str, timeout_s: int = 30) -> subprocess.CompletedProcess[str]:
    options = ["-o", f"ConnectTimeout={timeout_s}"]
    argv = ["ssh", "-F", str(lab.ssh_config), *options, host, *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)


def connect(lab: Lab, host: str, to: str, port: int, timeout_s: float = TIMEOUT_S) -> str:
    return output(lab, host, sys.executable, "-c", CONNECT, to, str(port), str(timeout_s))


@contextlib.contextmanager
def serving(lab: Lab, host: str, program: str, *arguments: str) -> Iterator[None]:
    argv = [sys.executable, "-c", program, *arguments]
    with lab.popen(host, argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield
        server.kill()


def seconds_to_send(lab: Lab, size: int) -> float:
    return float(output(lab, "n1", sys.executable, "-c", SEND, lab.address("n2"), str(size)))


# --- properties of a host


def test_hosts_have_separate_names_and_network(pair: Lab) -> None:
    assert pair.names == ("n1", "n2")
    assert output(pair, "n1", "hostname") == "n1"
    assert pair.address("n1") in output(pair, "n1", "ip", "-brief", "address")
    assert output(pair, "n1", "getent", "hosts", "n1").split()[0] == "127.0.1.1"
    assert output(pair, "n1", "getent", "hosts", "n2").split()[0] == pair.address("n2")
    assert sorted(output(pair, "n1", "ls", "/sys/class/net").split()) == ["eth0", "lo"]


@pytest.mark.parametrize("folder", ["/dev/shm", "/tmp", "/run", "~"])
def test_hosts_have_separate_folders(pair: Lab, folder: str) -> None:
    pair.exec("n1", ["sh", "-c", f"touch {folder}/only-here"], check=True)
    assert "only-here" not in output(pair, "n2", "sh", "-c", f"ls {folder}")
    assert not Path(folder, "only-here").expanduser().exists()


def test_machine_and_boot_ids_differ(pair: Lab) -> None:
    # a container's image has no machine-id before its first boot
    machine_id = [path for path in ("/etc/machine-id",) if Path(path).exists()]
    for file in (*machine_id, "/proc/sys/kernel/random/boot_id"):
        assert output(pair, "n1", "cat", file) != output(pair, "n2", "cat", file)


def test_interpreter_and_project_are_shared(pair: Lab) -> None:
    assert output(pair, "n1", "pwd") == str(Path.cwd())
    assert output(pair, "n1", sys.executable, "-c", "import sys; print(sys.prefix)") == sys.prefix


# --- ssh


def test_ssh_from_outside(pair: Lab) -> None:
    result = ssh(pair, "n2", "hostname; echo $HOME")
    assert (result.returncode, result.stdout.split()) == (0, ["n2", pair.home_inside()])
    assert ssh(pair, pair.address("n1"), "hostname").stdout == "n1\n"
    assert "Accepted publickey" in pair.sshd_log("n2").read_text()


def test_ssh_from_host_to_host_needs_no_option(pair: Lab) -> None:
    assert output(pair, "n1", "ssh", "n2", "hostname") == "n2"
    assert output(pair, "n1", "ssh", "-F", str(pair.ssh_config), "n2", "hostname") == "n2"


def test_ssh_allocates_terminal(pair: Lab) -> None:
    result = ssh(pair, "n1", "-tt", "tty")
    assert result.stdout.strip().startswith("/dev/pts/")


def test_rejects_changed_host_key(pair: Lab) -> None:
    known = pair.layout.known_hosts
    original = known.read_text()
    lines = original.splitlines()
    swapped = [lines[0].split()[0], *lines[1].split()[1:]]
    known.write_text(" ".join(swapped) + "\n")
    try:
        result = ssh(pair, "n1", "true")
    finally:
        known.write_text(original)
    assert result.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in result.stderr


def test_closed_port_gives_ssh_error(pair: Lab) -> None:
    result = ssh(pair, "n1", "-p", "23", "true")
    assert result.returncode == 255
    assert "port 23: Connection refused" in result.stderr


# --- exec


def test_exec_preserves_arguments_and_environment(pair: Lab) -> None:
    hostile = ["a b", ";", "$HOME", "*", "'\"", "\n", "", "ü€", "--", "-x"]
    show = "import sys, os, json; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    argv = [sys.executable, "-I", "-X", "utf8", "-c", show, *hostile]
    env = {"HOSTILE": "".join(hostile), "PYTHONCOERCECLOCALE": "0"}
    arguments, environment = json.loads(pair.exec("n1", argv, env=env, check=True).stdout)
    assert arguments == hostile
    assert environment.pop("LC_CTYPE", "C.UTF-8") == "C.UTF-8"  # the child's Python adds it
    assert environment == {**pair.environment("n1"), **env}


def test_exec_adds_no_environment_variable(pair: Lab) -> None:
    names = {line.split("=")[0] for line in output(pair, "n1", "env").splitlines()}
    assert names == set(pair.environment("n1"))


def test_caller_environment_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIDE", "secret")
    with Lab(LabOptions(hosts=1)) as lab:
        assert "secret" not in output(lab, "n1", "cat", "/proc/1/environ", "/proc/self/environ")


def test_exec_passes_stdin_and_returns_status(pair: Lab) -> None:
    assert pair.exec("n1", ["sh", "-c", "exit 7"]).returncode == 7
    assert pair.exec("n1", ["sh", "-c", "kill -TERM $$"]).returncode == -signal.SIGTERM
    assert pair.exec("n1", ["sh", "-c", "kill -KILL $$"]).returncode == -signal.SIGKILL
    assert pair.exec("n1", ["cat"], input="in\n").stdout == "in\n"
    missing = pair.exec("n1", ["no-such-program"])
    assert (missing.returncode, missing.stderr) == (
        127,
        "no-such-program: No such file or directory\n",
    )


def test_exec_timeout_kills_process_on_host(pair: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        pair.exec("n1", ["sleep", "100"], timeout=0.3)
    assert eventually(lambda: pair.processes("n1") == [])


def test_popen_forwards_signals(pair: Lab) -> None:
    trap = "trap 'echo got it; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    with pair.popen("n1", ["sh", "-c", trap], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.terminate()
        assert child.stdout.read() == "got it\n"
    assert child.returncode == 5


def test_lists_processes_and_listeners(pair: Lab) -> None:
    with serving(pair, "n1", SERVE, "6000"):
        ((pid, command),) = pair.processes("n1")
        assert command.startswith(sys.executable)
        assert Path(f"/proc/{pid}").exists()
        assert pair.listeners("n1") == ["0.0.0.0:6000"]
        assert pair.listeners("n2") == []
        assert connect(pair, "n2", "n1", 6000) == "hello"
    assert eventually(lambda: pair.processes("n1") == [])


def test_error_names_unknown_host(pair: Lab) -> None:
    with pytest.raises(LabError, match="no host 'n9'"):
        pair.exec("n9", ["true"])


# --- faults


def test_power_off_and_on(healed: Lab) -> None:
    healed.home("n2").joinpath("kept").write_text("")
    with healed.popen("n2", ["sleep", "100"]) as child:
        assert eventually(lambda: len(healed.processes("n2")) == 1)
        healed.fault("power-off", "n2")
        assert child.wait(TIMEOUT_S) == -signal.SIGKILL
    powered_off = healed.exec("n2", ["true"])
    assert (powered_off.returncode, powered_off.stderr) == (
        255,
        "paceline lab: n2 is powered off\n",
    )
    result = ssh(healed, "n2", "true", timeout_s=1)
    assert result.returncode == 255
    assert "port 22: Connection timed out" in result.stderr
    healed.heal("n2")
    assert "kept" in ssh(healed, "n2", "ls").stdout


def test_heal_starts_dead_sshd(healed: Lab) -> None:
    """As the first process started it: a host with it can still be powered off."""
    for _ in range(2):
        healed.exec("n2", ["sh", "-c", "kill -9 -1"])
        assert eventually(lambda: "Connection refused" in ssh(healed, "n2", "true").stderr)
        assert [host["sshd"] for host in healed.status()["hosts"]] == [True, False]
        healed.heal()
        assert [host["sshd"] for host in healed.status()["hosts"]] == [True, True]
        assert ssh(healed, "n2", "hostname").stdout == "n2\n"
        assert eventually(lambda: healed.processes("n2") == [])
    healed.fault("power-off", "n2")


def test_connection_to_powered_off_host_times_out(healed: Lab) -> None:
    with serving(healed, "n2", SERVE, "6000"):
        assert connect(healed, "n1", "n2", 6000) == "hello"
        healed.fault("power-off", "n2")
    assert connect(healed, "n1", "n2", 6000, 0.3) == "timeout"


def test_freeze_and_thaw(healed: Lab) -> None:
    with serving(healed, "n2", SERVE, "6000"):
        healed.fault("freeze", "n2")
        # The kernel still completes the handshake, but no process answers.
        assert connect(healed, "n1", "n2", 6000, 0.3) == "timeout"
        healed.undo("freeze", "n2")
        assert connect(healed, "n1", "n2", 6000) == "hello"


def test_unplug_and_plug(healed: Lab) -> None:
    healed.fault("unplug", "n2")
    assert connect(healed, "n1", "n2", 22, 0.3) == "timeout"
    healed.undo("unplug", "n2")
    assert connect(healed, "n1", "n2", 22).startswith("SSH-2.0")


def test_drop_ports(healed: Lab) -> None:
    with serving(healed, "n2", SERVE, "6000"):
        healed.fault("drop", "n2", "5000,5999-6001")
        assert connect(healed, "n1", "n2", 6000, 0.3) == "timeout"
        assert connect(healed, "n1", "n2", 22).startswith("SSH-2.0")
        healed.undo("drop", "n2", "5000,5999-6001")
        assert connect(healed, "n1", "n2", 6000) == "hello"


def test_reject_ports(healed: Lab) -> None:
    with serving(healed, "n2", SERVE, "6000"):
        healed.fault("reject", "n2", "6000")
        assert connect(healed, "n1", "n2", 6000) == str(errno.ECONNREFUSED)


@pytest.mark.parametrize("kind", ["drop", "reject"])
def test_blocking_ephemeral_ports_keeps_ssh_open(healed: Lab, kind: str) -> None:
    with serving(healed, "n2", SERVE, "6000"), serving(healed, "n1", SERVE, "6000"):
        healed.fault(kind, "n2", "all-ephemeral")
        assert connect(healed, "n1", "n2", 6000, 0.3) != "hello"
        assert connect(healed, "n2", "n1", 6000) == "hello"  # connections from n2 are open
        assert connect(healed, "n2", "n2", 6000) == "hello"
        assert ssh(healed, "n2", "hostname").stdout == "n2\n"


@pytest.mark.parametrize("kind", ["drop", "reject"])
def test_blocking_ports_closes_ssh(healed: Lab, kind: str) -> None:
    healed.fault(kind, "n2", "all")
    assert not connect(healed, "n1", "n2", 22, 0.3).startswith("SSH")
    healed.undo(kind, "n2")
    assert connect(healed, "n1", "n2", 22).startswith("SSH")


def test_unreachable_fault_gives_no_route(healed: Lab) -> None:
    healed.fault("unreachable", "n1", "n2")
    assert connect(healed, "n1", "n2", 22) == str(errno.EHOSTUNREACH)


def test_deaf_fault_drops_incoming_packets(healed: Lab) -> None:
    receive = "import socket; s = socket.create_server(('', 6001)); s.settimeout(1); s.accept()"
    healed.fault("deaf", "n2", "n1")
    assert connect(healed, "n1", "n2", 22, 0.3) == "timeout"
    assert healed.exec("n2", [sys.executable, "-c", receive]).returncode != 0


def test_slow_fault_limits_rate(healed: Lab) -> None:
    with serving(healed, "n2", RECEIVE):

        def is_sent_in(seconds: float) -> bool:
            return seconds_to_send(healed, 1_000_000) < seconds

        assert eventually(lambda: is_sent_in(0.3))  # once is enough: a busy machine delays some
        healed.fault("slow", "n2", "20mbit")
        assert seconds_to_send(healed, 1_000_000) > 0.3  # 8 Mbit at 20 Mbit/s
        assert eventually(lambda: is_sent_in(0.8))
        healed.undo("slow", "n2")
        assert eventually(lambda: is_sent_in(0.3))


def test_total_and_partial_packet_loss(healed: Lab) -> None:
    healed.fault("loss", "n2", "100")
    assert connect(healed, "n1", "n2", 22, 0.3) == "timeout"
    healed.undo("loss", "n2")
    healed.fault("loss", "n2", "5%")
    with serving(healed, "n2", RECEIVE):
        assert seconds_to_send(healed, 1_000_000) > 0
    assert "statistic" not in output(healed, "n2", "true")


def test_kill_by_pid_and_by_pattern(healed: Lab) -> None:
    with healed.popen("n2", ["sleep", "101"]) as child:
        assert eventually(lambda: len(healed.processes("n2")) == 1)
        healed.fault("kill", "n2", "sleep 10.")
        assert child.wait(TIMEOUT_S) == -signal.SIGKILL
    argv = ["sh", "-c", "echo $$; exec sleep 102"]
    with healed.popen("n2", argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        healed.fault("kill", "n2", child.stdout.readline().strip())
        assert child.wait(TIMEOUT_S) == -signal.SIGKILL
    with pytest.raises(LabError, match="no process"):
        healed.fault("kill", "n2", "sleep 10.")


def test_lists_faults_and_rejects_duplicates(healed: Lab) -> None:
    healed.fault("unplug", "n2")
    assert healed.status()["faults"] == [{"kind": "unplug", "host": "n2", "arguments": []}]
    with pytest.raises(LabError, match="already active on n2"):
        healed.fault("unplug", "n2")
    healed.heal()
    assert healed.status()["faults"] == []
    with pytest.raises(LabError, match="not active"):
        healed.undo("unplug", "n2")


def test_power_off_clears_other_faults(healed: Lab) -> None:
    for kind, *arguments in (("loss", "50"), ("drop", "all"), ("freeze",), ("power-off",)):
        healed.fault(kind, "n2", *arguments)
    assert [fault["kind"] for fault in healed.status()["faults"]] == ["power-off"]
    healed.heal("n2")
    assert connect(healed, "n1", "n2", 22).startswith("SSH")


# --- options


def test_adversarial_network_options_combined() -> None:
    options = LabOptions(
        hosts=2,
        debian_hosts=True,
        dead_interface=True,
        bridge_address=True,
        interface_names=("eth0", "ens3"),
    )
    with Lab(options) as lab:
        names = {name: output(lab, name, "ls", "/sys/class/net").split() for name in lab.names}
        assert names == {
            "n1": ["dead0", "docker0", "eth0", "lo"],
            "n2": ["dead0", "docker0", "ens3", "lo"],
        }
        assert output(lab, "n1", "hostname", "-I").split()[0] == "10.66.0.11"
        assert connect(lab, "n1", "10.66.0.12", 22, 0.3) == "timeout"
        assert connect(lab, "n1", "172.17.0.1", 22).startswith("SSH")  # an address of n1 itself
        assert output(lab, "n1", "ssh", "n2", "hostname") == "n2"


def test_hostname_can_resolve_to_dead_interface() -> None:
    with Lab(LabOptions(hosts=1, dead_interface=True, dead_name=True)) as lab:
        assert output(lab, "n1", "getent", "hosts", "n1").split()[0] == "10.66.0.11"


def test_rate_and_latency() -> None:
    with (
        Lab(LabOptions(hosts=2, rate="50mbit", latency="10ms")) as lab,
        serving(lab, "n2", RECEIVE),
    ):
        assert seconds_to_send(lab, 1) > 0.02
        assert seconds_to_send(lab, 2_000_000) > 0.32
        lab.fault("power-off", "n2")
        lab.heal("n2")
        assert connect(lab, "n1", "n2", 22).startswith("SSH")


def test_private_hidden_and_small_folders(tmp_path: Path) -> None:
    for name in ("own", "hidden", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("machine\n")
    own, hidden, small = (str(tmp_path / name) for name in ("own", "hidden", "small"))
    options = LabOptions(
        hosts=2, private=(own, f"{small}:1m"), hide=(hidden,), share=(str(tmp_path),)
    )
    with Lab(options) as lab:
        lab.exec("n1", ["sh", "-c", f"echo n1 >> {own}/file"], check=True)
        assert output(lab, "n1", "cat", f"{own}/file") == "machine\nn1"
        assert output(lab, "n2", "cat", f"{own}/file") == "machine"
        assert output(lab, "n1", "ls", hidden) == ""
        lab.fault("fill-disk", "n1", small, "100k")
        write = f"head -c 50k /dev/zero > {small}/a && head -c 200k /dev/zero > {small}/b"
        assert "No space left" in lab.exec("n1", ["sh", "-c", write]).stderr
        lab.heal("n1")
        lab.exec("n1", ["sh", "-c", write], check=True)
        with pytest.raises(LabError, match="not a disk that can be filled"):
            lab.fault("fill-disk", "n1", own)
    assert (tmp_path / "own" / "file").read_text() == "machine\n"


def test_hosts_can_share_home() -> None:
    with Lab(LabOptions(hosts=2, shared_home=True)) as lab:
        lab.exec("n1", ["sh", "-c", "echo n1 > ~/file"], check=True)
        assert ssh(lab, "n2", "cat file").stdout == "n1\n"
        assert (lab.home("n2") / "file").read_text() == "n1\n"


def test_custom_python_and_disabled_sshd(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    options = LabOptions(python={"n2": str(venv)}, no_sshd=("n1",), share=(str(venv),))
    with Lab(options) as lab:
        assert lab.settings is not None
        assert lab.settings.read_text() == f'[hosts.n2]\npython = "{venv}/bin/python"\n'
        assert ssh(lab, "n2", "command -v python").stdout.strip() == f"{venv}/bin/python"
        assert output(lab, "n2", "which", "python") == f"{venv}/bin/python"
        assert "Connection refused" in ssh(lab, "n1", "true").stderr
        assert [host["sshd"] for host in lab.status()["hosts"]] == [False, True]


def test_ipv6_only() -> None:
    with Lab(LabOptions(hosts=2, ipv6_only=True)) as lab:
        assert lab.address("n2") == "fd77::12"
        assert output(lab, "n1", "ssh", "n2", "hostname") == "n2"
        assert ssh(lab, "n2", "hostname").stdout == "n2\n"
        assert "10.77" not in output(lab, "n1", "ip", "address")


# --- removal of labs


def _mounts() -> list[str]:
    return sorted(Path("/proc/self/mountinfo").read_text().splitlines())


def _interfaces() -> list[str]:
    return sorted(entry.name for entry in Path("/sys/class/net").iterdir())


def _processes_in(namespaces: set[int]) -> list[str]:
    """Returns the processes that are in any of these namespaces, of whatever kind."""
    everyone = lab_processes.all_processes()
    running = (p for p in everyone if p.state != "Z")
    return [p.command for p in running if namespaces & _namespaces_of(p.pid)]


def _namespaces_of(pid: int) -> set[int]:
    inodes = set()
    for kind in ("pid", "net", "mnt", "uts", "ipc"):
        with contextlib.suppress(OSError):
            inodes.add(Path(f"/proc/{pid}/ns/{kind}").stat().st_ino)
    return inodes


def _namespaces_of_lab(lab: Lab) -> set[int]:
    owner = read_owner(lab.layout)
    assert owner is not None
    pids = [owner.pid, *(host["pid"] for host in lab.status()["hosts"])]
    own = set().union(*map(_namespaces_of, pids)) - _namespaces_of(os.getpid())
    assert len(own) == 5 * len(pids)
    assert len(_processes_in(own)) >= len(pids)
    return own


def _labs() -> list[str]:
    return [layout.root.name for layout in list_labs()]


HOLD = """
import sys, time
from paceline.lab import Lab, LabOptions
lab = Lab(LabOptions(hosts=2, name=sys.argv[1], latency="1ms")).up()
lab.popen("n1", ["sh", "-c", "sleep 1000 & sleep 1000"])
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("victim", ["owner", "caller"])
def test_sigkill_cleans_up_mounts_and_processes(victim: str) -> None:
    initial_state = (_mounts(), _interfaces())
    name = f"test-{os.getpid()}"
    argv = [sys.executable, "-c", HOLD, name]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "ready\n"
        namespaces = _namespaces_of_lab(Lab.attach(name))
        owner = read_owner(Lab.attach(name).layout)
        assert owner is not None
        os.kill(owner.pid if victim == "owner" else caller.pid, signal.SIGKILL)
        assert eventually(lambda: not owner.is_alive())
        caller.kill()
    assert eventually(lambda: _processes_in(namespaces) == [])
    assert (_mounts(), _interfaces()) == initial_state
    with Lab(LabOptions(hosts=1)):  # the next lab removes the files of a killed owner
        assert name not in _labs()


@pytest.mark.parametrize(("latency", "fault"), [("", ""), ("100ms", ""), ("1ms", "unplug")])
def test_down_cleans_up_and_is_idempotent(latency: str, fault: str) -> None:
    initial_state = (_mounts(), _interfaces())
    lab = Lab(LabOptions(hosts=2, latency=latency)).up()
    namespaces = _namespaces_of_lab(lab)
    folder = lab.layout.root
    argv = ["ssh", "-F", str(lab.ssh_config), "n1", "sleep 100"]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as client:
        assert eventually(lambda: any("sleep" in command for _, command in lab.processes("n1")))
        if fault:
            lab.fault(fault, "n1")
        lab.down()
        assert client.wait(TIMEOUT_S) == 255  # ssh's status for a lost connection
    lab.down()
    assert not folder.exists()
    # the parent may not have waited for a killed process yet
    assert eventually(lambda: _processes_in(namespaces) == []), _processes_in(namespaces)
    assert (_mounts(), _interfaces()) == initial_state


def test_rejects_name_of_running_lab() -> None:
    with Lab(LabOptions(hosts=1)) as lab, pytest.raises(LabError, match="is up already"):
        Lab(LabOptions(hosts=1, name=lab.name)).up()


def test_failed_start_cleans_up() -> None:
    name = f"failing-{os.getpid()}"
    with pytest.raises(LabError, match="not a folder here"):
        Lab(LabOptions(hosts=1, name=name, hide=("/no/such/folder",))).up()
    with pytest.raises(LabError, match="cannot do that") as caught:
        Lab(LabOptions(hosts=2, name=name, hide=("/usr/sbin",))).up()
    assert "sshd" in caught.value.found
    assert name not in _labs()
    assert not [p for p in lab_processes.all_processes() if name in p.command]


def test_many_hosts() -> None:
    with Lab(LabOptions(hosts=16)) as lab:
        assert connect(lab, "n1", "n16", 22).startswith("SSH")


# --- the machine around the lab


def test_lab_ignores_packet_filters_of_machine() -> None:
    """dockerd sets FORWARD to DROP and filters bridges; both are per network namespace."""
    script = (
        "iptables -P FORWARD DROP && sysctl -qw net.ipv4.ip_forward=1;"
        f" {sys.executable} - <<'END'\n"
        "from paceline.lab import Lab, LabOptions\n"
        "with Lab(LabOptions(hosts=2)) as lab:\n"
        "    print(lab.exec('n1', ['ssh', 'n2', 'hostname'], timeout=60).stdout)\n"
        "END\n"
    )
    argv = ["unshare", "--net", "sh", "-c", script]
    result = subprocess.run(
        argv, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False
    )
    assert (result.stdout.strip(), result.returncode) == ("n2", 0), result.stderr


def test_failed_host_start_reports_cause() -> None:
    """The error does not name a later failure of the switch that the missing host caused."""
    with pytest.raises(LabError, match="mount overlay on /proc"):
        Lab(LabOptions(hosts=2, private=("/proc",))).up()


ROOTLESS = """
from paceline.lab import Lab, LabOptions
with Lab(LabOptions(hosts=2, rate="100mbit", private=("/srv",))) as lab:
    print(lab.exec("n1", ["ssh", "n2", "hostname; id -u"], timeout=60, check=True).stdout)
    print(lab.exec("n1", ["touch", "/srv/x"]).stderr)
    print(lab.exec("n1", ["ssh", "-tt", "n2", "tty"], timeout=60).stdout)
    lab.fault("drop", "n2", "all")
    lab.fault("loss", "n2", "5")
    lab.heal()
    lab.fault("power-off", "n2")
    lab.heal()
    print(lab.exec("n1", ["ssh", "n2", "hostname"], timeout=60, check=True).stdout)
    print(lab.processes("n2"), lab.listeners("n2"))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without root already")
def test_rootless(readable_source: str) -> None:
    user = pwd.getpwnam("daemon")  # every machine has this user, and nothing runs as it
    uid = user.pw_uid
    pythons = [sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin")]
    usable = [python for python in pythons if python and _runs_for(uid, python, readable_source)]
    assert usable, "no Python that other users may run"
    result = _as_user(uid, [usable[0], "-c", ROOTLESS], readable_source)
    assert result.returncode == 0, result.stderr
    words = result.stdout.split()
    assert words[:2] == ["n2", str(uid)]
    assert words[-3:] == ["n2", "[]", "[]"]
    assert "/dev/pts/" in result.stdout
    shutil.rmtree(f"/tmp/paceline-lab-{uid}", ignore_errors=True)


@pytest.fixture
def readable_source() -> Iterator[str]:
    """Copies the code to a folder that any user may read; a checkout in root's home is closed."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-source-", dir="/tmp"))
    folder.chmod(0o755)
    package_dir = Path(paceline.lab.__file__).parents[1]
    shutil.copytree(
        package_dir, folder / package_dir.name, ignore=shutil.ignore_patterns("__pycache__")
    )
    yield str(folder)
    shutil.rmtree(folder)


def _runs_for(uid: int, python: str, source: str) -> bool:
    check = "import sys, paceline; sys.exit(sys.version_info < (3, 10))"
    try:
        return _as_user(uid, [python, "-c", check], source).returncode == 0
    except OSError:
        return False


def _as_user(uid: int, argv: list[str], source: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
        env=env,
        cwd="/",
        user=uid,
        group=uid,
        extra_groups=[],
    )


# --- the commands

CLI = "from paceline.cli.verbs.lab import command; command()"


def paceline_lab(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", CLI, *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)


def test_cli_from_up_to_down() -> None:
    name = f"cli-{os.getpid()}"
    try:
        up = paceline_lab("up", "--name", name, "--hosts", "2")
        config = f"{parent_folder()}/{name}/ssh_config"
        assert up.returncode == 0, up.stderr
        assert config in up.stdout
        assert ssh(Lab.attach(name), "n2", "hostname").stdout == "n2\n"
        shell_result = paceline_lab(
            "shell", "--name", name, "n2", "--", "sh", "-c", "hostname; exit 3"
        )
        assert (shell_result.stdout, shell_result.returncode) == ("n2\n", 3)
        assert paceline_lab("fault", "--name", name, "slow", "n1", "1mbit").returncode == 0
        status = json.loads(paceline_lab("status", "--name", name, "--json").stdout)[name]
        assert status["faults"] == [{"kind": "slow", "host": "n1", "arguments": ["1mbit"]}]
        assert [host["up"] for host in status["hosts"]] == [True, True]
        assert "slow 1mbit" in paceline_lab("status", "--name", name).stdout
        argv = [sys.executable, "-c", CLI, "status", "--name", name]
        source = {"PYTHONPATH": str(Path(paceline.lab.__file__).parents[2])}
        from_a_host = Lab.attach(name).exec("n1", argv, env=source, check=True)
        assert "slow 1mbit" in from_a_host.stdout
        assert paceline_lab("fault", "slow", "n1", "--undo", "--name", name).returncode == 0
        assert paceline_lab("heal", "--name", name).returncode == 0
    finally:
        downs = [paceline_lab("down", "--name", name) for _ in range(2)]
    assert [down.returncode for down in downs] == [0, 0]
    assert "no lab called" in downs[1].stdout


def test_foreground_ends_with_sigterm() -> None:
    argv = [sys.executable, "-u", "-c", CLI, "up", "--foreground", "--hosts", "1", "--name", "fg"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        assert "1 host up" in up.stdout.readline()
        up.terminate()
        assert up.wait(TIMEOUT_S) == 0
    assert "fg" not in _labs()


def test_lab_name_as_hosts_option(tmp_path: Path) -> None:
    """``-H lab`` and the setting stand for the lab's host file and its ssh config."""
    (tmp_path / "paceline.toml").write_text('[run]\nhosts = "lab:settings"\n')
    with Lab(LabOptions(hosts=2, name="settings")) as lab:
        shown = launches.paceline("hosts", "--json", "-H", "lab:settings", cwd=tmp_path)
        launches.trust_settings(tmp_path)
        assert [host["name"] for host in json.loads(shown.stdout)["hosts"]] == ["n1", "n2"]
        checked = launches.paceline("check", "--quick", cwd=tmp_path)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert "hosts: n1, n2 (paceline.toml: lab:settings)" in checked.stderr
        ran = launches.paceline("run", "--no-python", "hostname", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert {"[n1/0] n1", "[n2/1] n2"} == set(ran.stdout.splitlines())
        assert lab.name == "settings"
    after_down = launches.paceline("hosts", cwd=tmp_path)
    assert after_down.returncode == 2
    assert "no lab called 'settings' is up" in after_down.stderr
