"""Tests nodes that three real MPIs start: same results and exits as over SSH, clear errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import intels_demo
import pytest
from every_transport import EveryTransport
from launches import SOURCE, TEST_LIMIT_S, Site, eventually
from transports import Transport, fetched, mpiexec, site_in, sniffed

pytestmark = [pytest.mark.lab, pytest.mark.slow]

FLAVOURS = ("intel", "mpich", "openmpi")
# for tests that depend on nodes started by an MPI, but not on which MPI
openmpi_only = pytest.mark.parametrize("transport", ["openmpi"], indirect=True)
intel_only = pytest.mark.parametrize("transport", ["intel"], indirect=True)
SECRET = "T0p-secret-0123456789-of-mine"


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return site_in(new_lab, tmp_path_factory.mktemp("mpi"), hosts=3)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    """Heals the lab; checks that nothing runs or listens after a test."""
    yield shared
    shared.lab.heal()
    login = ["ssh", "-o", "BatchMode=yes", "n2", "true"]
    assert eventually(lambda: shared.lab.exec("n1", login, timeout=20).returncode == 0)
    # nodes whose launcher was killed may wait for it until the lease ends
    assert shared.leftovers(12.0) == ""


@pytest.fixture(params=FLAVOURS)
def transport(request: pytest.FixtureRequest, site: Site) -> Transport:
    options = ("-H", "n1,n2", "--via", "mpi", "--mpiexec", mpiexec(request.param))
    return Transport(site, options)


class TestMpi(EveryTransport):
    """Runs the tests of all transports; each MPI starts agents, and starts lost agents again.

    Exits of ranks involve only the launcher and its agents, so one MPI is enough for them.
    """

    @openmpi_only
    def test_result_matches_ssh_run(self, transport: Transport) -> None:
        super().test_result_matches_ssh_run(transport)

    @openmpi_only
    def test_reports_killed_rank(self, transport: Transport) -> None:
        super().test_reports_killed_rank(transport)

    @intel_only
    def test_rejects_intruders(self, transport: Transport) -> None:
        super().test_rejects_intruders(transport)

    @intel_only
    def test_interrupt_ends_unresponsive_ranks(self, transport: Transport) -> None:
        super().test_interrupt_ends_unresponsive_ranks(transport)

    @intel_only
    def test_stop_command_saves_and_ends_run(self, transport: Transport) -> None:
        super().test_stop_command_saves_and_ends_run(transport)


def test_secrets_are_not_in_command_lines_or_traffic(
    transport: Transport,
) -> None:
    """MPI sends the environment in the clear, and to whoever asks: it must not have them."""
    transport = replace(transport, env={"T_SECRET": SECRET})
    args = ("--env", "T_SECRET", "--no-torch", "-p", "1", "end.py", "wait")
    with sniffed(transport.site) as seen, transport.started(*args) as (_, directory):
        assert transport.waits(directory, 2)
        pids = [pid for name in ("n1", "n2") for pid, _ in transport.site.lab.processes(name)]
        keys = {_environment(pid).get("PACELINE_CALL_KEY") for pid in pids} - {None}
        lines = [_read(f"/proc/{pid}/cmdline") for pid in pids]
    assert keys
    secrets = [word.encode() for word in (SECRET, *keys) if word]
    assert not [line for line in lines if any(secret in line for secret in secrets)]
    assert len(seen) > 10_000
    assert not [secret for secret in secrets if secret in seen]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _environment(pid: int) -> dict[str, str]:
    entries = _read(f"/proc/{pid}/environ").decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_names_unreachable_and_answering_hosts(transport: Transport) -> None:
    """Users run ``mpiexec -ppn 1 -f hostfile hostname`` for this."""
    is_powered_off = (
        "impi" in transport.options[-1]
    )  # the others get a refused port, which they notice faster
    transport.site.lab.fault(*(("power-off", "n2") if is_powered_off else ("reject", "n2", "22")))
    options = ("-H", "n1,n2,n3", *transport.options[2:])
    ended = Transport(transport.site, options).run("--no-python", "hostname")
    assert ended.code == 1, ended.err
    assert "cannot start anything on 1 of 3 hosts: n2" in ended.err
    assert "answered: n1, n3" in ended.err
    causes = ("n2: no answer", "n2: no route") if is_powered_off else ("n2: refused",)
    assert any(cause in ended.err for cause in causes)


@pytest.mark.parametrize(
    ("transport", "typed_on"),
    [*((flavour, "n3") for flavour in FLAVOURS), ("intel", "n1"), ("openmpi", "n1")],
    indirect=["transport"],
)
def test_runs_from_machine_with_unresolvable_name(transport: Transport, typed_on: str) -> None:
    """As on an ordinary laptop: neither the hosts nor the machine itself can resolve its name.

    Ranks are numbered in the order of the hosts: Open MPI itself would begin with this machine.
    """
    unknown = ("unshare", "--uts", "sh", "-c", 'hostname a-laptop; exec "$@"', "sh")
    options = ("-H", "n2,n1", *transport.options[2:])
    laptop = Transport(transport.site, options, host=typed_on, prefix=unknown)
    ended = laptop.run("--no-python", "hostname")
    assert ended.code == 0, ended.err
    assert ended.lines(0) == ["n2"]
    assert ended.lines(1) in (["n1"], ["a-laptop"])  # its own name if MPI starts it without ssh


@pytest.mark.parametrize("transport", ["intel", "mpich"], indirect=True)
def test_reports_unresolvable_launcher_name(transport: Transport) -> None:
    """The error follows the words of the log; it does not mention ports and firewalls.

    Open MPI has no such name: its daemons get addresses.
    """
    unknown = ("unshare", "--uts", "sh", "-c", 'hostname a-laptop; exec "$@"', "sh")
    by_name = (*transport.options, "--via-arg=-localhost", "--via-arg=a-laptop")
    ended = Transport(transport.site, by_name, host="n3", prefix=unknown).run(
        "--no-python", "hostname"
    )
    assert ended.code == 1
    assert "name resolution failed" in ended.err
    assert "/etc/hosts" in ended.err
    assert "all TCP ports" not in ended.err
    assert "Traceback" not in ended.err


def test_reports_host_without_mpi(site: Site) -> None:
    """Intel MPI is at a path that only the first host has."""
    source = Path(mpiexec("intel")).parents[1]
    mpi_copy = "/var/tmp/own-mpi"
    copy = ["sh", "-c", f"mkdir -p {mpi_copy} && cp -r {source}/bin {source}/lib {mpi_copy}/"]
    site.lab.exec("n1", copy, timeout=TEST_LIMIT_S, check=True)
    options = ("-H", "n1,n2", "--via", "mpi", "--mpiexec", f"{mpi_copy}/bin/mpiexec.hydra")
    ended = Transport(site, options).run("--no-python", "hostname")
    assert ended.code == 1
    assert "cannot start anything on 1 of 2 hosts: n2" in ended.err, ended.err
    assert "MPI is not installed there" in ended.err


def test_reports_missing_mpi(site: Site) -> None:
    transport = Transport(site, ("-H", "n1,n2", "--via", "mpi"), env={"PATH": "/nowhere"})
    ended = transport.run("--no-python", "hostname")
    assert ended.code == 2
    assert "--via mpi needs an MPI, and there is none" in ended.err


def test_rejects_mixed_mpis_on_path(site: Site) -> None:
    folder = site.project.parent / "mixed"
    folder.mkdir(exist_ok=True)
    for name, flavour in (("mpiexec", "mpich"), ("mpirun", "openmpi")):
        if not (folder / name).exists():
            (folder / name).symlink_to(mpiexec(flavour))
    path = f"{folder}:{os.environ['PATH']}"
    ended = Transport(site, ("-H", "n1,n2", "--via", "mpi"), env={"PATH": path}).run("tell.py")
    assert ended.code == 2
    assert "two MPIs are mixed on PATH" in ended.err


@intel_only
def test_runs_intel_container_demo(transport: Transport) -> None:
    """The script is unmodified and reads PMI_RANK and MPI_LOCALRANKID; gloo replaces oneCCL."""
    run_intel_demo(transport, fetched(intels_demo.PUBLISHED))


@openmpi_only
def test_runs_stand_in_for_intel_demo(transport: Transport) -> None:
    run_intel_demo(transport, intels_demo.STAND_IN)


def run_intel_demo(transport: Transport, script: Path) -> None:
    project = transport.site.project
    intels_demo.put_into(project, script)
    env = ["--env", f"PYTHONPATH={intels_demo.LIBRARIES}", "--backend", "ccl"]
    ended = transport.run("-p", "1", *env, *intels_demo.WORDS)
    assert ended.code == 0, ended.err
    accuracy_lines = [line for rank in (0, 1) for line in ended.lines(rank) if "accuracy=" in line]
    assert len(accuracy_lines) == 2, ended.out
    assert (project / "mnist_cnn.pt").exists()


def test_env_command_under_mpirun(transport: Transport) -> None:
    """mpirun starts ``paceline env`` with a script that reads only RANK."""
    mpiexec_path = transport.options[-1]
    address = transport.site.lab.address("n1")
    rendezvous_env = {"MASTER_ADDR": address, "MASTER_PORT": "29517", "PYTHONPATH": str(SOURCE)}
    script = "import os, socket; print(os.environ['RANK'], os.environ['WORLD_SIZE'], " \
             "os.environ['LOCAL_RANK'], socket.gethostname(), flush=True)"  # fmt: skip
    command = [sys.executable, "-m", "paceline", "env", sys.executable, "-c", script]
    if "openmpi" in mpiexec_path:
        forwarded = [word for name in rendezvous_env for word in ("-x", name)]
        head = ["--host", "n1:2,n2:2", "-np", "4", "--map-by", "slot", *forwarded]
        head += ["--allow-run-as-root"]
    else:
        head = ["-hosts", "n1,n2", "-ppn", "2", "-n", "4"]
    result = transport.site.lab.exec(
        "n1", [mpiexec_path, *head, *command], env=rendezvous_env, timeout=TEST_LIMIT_S
    )
    assert result.returncode == 0, result.stderr
    lines = sorted(result.stdout.split("\n")[:-1])
    assert lines == ["0 4 0 n1", "1 4 1 n1", "2 4 0 n2", "3 4 1 n2"]
