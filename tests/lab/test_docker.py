"""Tests real Docker over SSH, with the agent in a container on each host and without sshd in it."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import intels_demo
import pytest
from dockerlab import IMAGE, ROOT, Docker, docker_on, python_mounts, write_image_with
from every_transport import EveryTransport
from launches import SOURCE, TEST_LIMIT_S, Site, eventually
from transports import PARTS, Transport, fetched, mpiexec, site_in

import paceline
from wheels import build_distributions, write_wheelhouse

pytestmark = [pytest.mark.lab, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(
    new_lab: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Site, Docker]]:
    folder = tmp_path_factory.mktemp("docker")
    site = site_in(new_lab, folder, hosts=3)
    with docker_on(site.lab, folder / "docker") as docker:
        yield site, docker


@pytest.fixture
def docker(cluster: tuple[Site, Docker]) -> Iterator[Docker]:
    """Checks that a test leaves no container, running or stopped."""
    docker = cluster[1]
    yield docker
    assert eventually(lambda: not docker.containers()), docker.containers()


@pytest.fixture
def transport(cluster: tuple[Site, Docker], docker: Docker) -> Transport:
    site = cluster[0]
    prefixes = {str(Path(sys.prefix)), str(Path(sys.base_prefix)), str(SOURCE.parent)}
    options = ("-H", "n1,n2", "--via", "docker", "--image", IMAGE, "--python", sys.executable)
    return Transport(site, (*options, *python_mounts(sorted(prefixes))))


class TestDocker(EveryTransport):
    """Runs the tests of all transports with one container per host."""


def test_reports_missing_image(transport: Transport, docker: Docker) -> None:
    docker.tell("n1", "tag", IMAGE, "only-here:1")
    options = [word.replace(IMAGE, "only-here:1") for word in transport.options]
    ended = Transport(transport.site, tuple(options)).run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "only-here:1 cannot be run on n2" in ended.err
    assert "the image is not there" in ended.err


def test_rejects_different_images_with_same_name(transport: Transport, docker: Docker) -> None:
    for name in ("n1", "n2"):  # the second import has another date, which makes it another image
        docker.tell(name, "import", str(docker.folder / "root.tar"), f"two:{name}")
        docker.tell(name, "tag", f"two:{name}", "twice:1")
    options = [word.replace(IMAGE, "twice:1") for word in transport.options]
    ended = Transport(transport.site, tuple(options)).run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "twice:1 is not the same image on all hosts" in ended.err


def test_wheel_installs_in_clean_container(docker: Docker) -> None:
    """pip installs it into a new environment, without network; a job of two ranks runs there."""
    wheelhouse = docker.folder / "wheels"
    wheelhouse.mkdir()
    wheel = build_distributions(wheelhouse).wheel
    write_wheelhouse(wheel, wheelhouse)
    (wheelhouse / "tell.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    python = Path(sys.base_prefix) / "bin" / "python3"
    mounts = [w for folder in dict.fromkeys(["/usr", sys.base_prefix])
              for w in ("-v", f"{folder}:{folder}:ro")]  # fmt: skip
    script = (
        f"set -e; export HOME=/tmp PATH=/tmp/env/bin:/usr/bin; {python} -m venv /tmp/env; "
        f"pip install --quiet --no-index --find-links /wheels /wheels/{wheel.name}; cd /tmp; "
        "paceline --version; paceline run --no-torch -p 2 /wheels/tell.py"
    )
    output = docker.tell("n1", "run", "--rm", "--network", "none", *mounts, "-v",
                         f"{wheelhouse}:/wheels:ro", IMAGE, "sh", "-c", script)  # fmt: skip
    assert f"paceline, version {paceline.__version__}" in output
    assert "rank 0" in output
    assert "rank 1" in output


def test_reports_stopped_daemon(transport: Transport, docker: Docker) -> None:
    docker.stop("n2")
    try:
        ended = transport.run("--no-torch", "tell.py")
    finally:
        docker.start("n2")
    assert ended.code == 1
    assert "cannot be run on n2" in ended.err
    assert "the daemon is not running" in ended.err


def test_uses_conda_environment_of_image(transport: Transport, docker: Docker) -> None:
    """Selects the interpreter by path; a sourced file activates the environment."""
    conda = write_conda(docker.folder / "conda-run", "export T_FROM=$CONDA_PREFIX")
    (transport.site.project / "conda.sh").write_text(f"source {CONDA}/bin/activate pytorch\n")
    python = ("--mount", f"{conda}:{CONDA}:ro", "--python", f"{CONDA}/envs/pytorch/bin/python")
    ended = transport.run(*python, "--activate", "conda.sh", "--no-torch", "-p", "1", "tell.py")
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        environment = ended.said(rank)["env"]
        assert bytes.fromhex(environment["T_FROM"]).decode() == f"{CONDA}/envs/pytorch"
        assert bytes.fromhex(environment["T_PYTHON"]).decode() == f"{CONDA}/envs/pytorch/bin/python"


def test_detached_run_replaces_lost_container(transport: Transport, docker: Docker) -> None:
    """The supervisor runs on a host, outside the containers. The launching machine stops the run.

    The supervisor's host gets another container when its own is lost.
    """
    arguments = ("--detach", "--supervisor", "n2", "--no-torch", "-p", "1", "member.py", "9999")
    detached = transport.run(*arguments)
    assert detached.code == 0, detached.err
    assert "continues without this command, supervised on n2\n" in detached.err
    location = detached.json("detached.json")
    run_folder = transport.site.lab.home("n2") / ".cache/paceline/detached" / location["run_id"]
    logs = [run_folder / f"run/logs/n{rank + 1}/{rank}.log" for rank in (0, 1)]
    assert all(eventually(lambda log=log: "began" in log.read_text()) for log in logs)  # type: ignore[misc]
    docker.tell("n2", "kill", *docker.tell("n2", "ps", "--quiet").split())
    assert eventually(lambda: "joined" in logs[1].read_text())
    assert len(docker.containers()) == 2
    assert transport.verb("status", str(detached.directory)).startswith(
        f"{detached.directory}: running"
    )
    transport.verb("stop", str(detached.directory))
    assert eventually(lambda: not run_folder.exists())
    assert detached.json("result.json")["interrupted"] == signal.SIGTERM
    assert "saved at" in (detached.directory / "logs/n1/0.log").read_text()
    assert eventually(lambda: not job_processes(transport.site)), job_processes(transport.site)


def test_detached_run_ends_with_supervisor(transport: Transport, docker: Docker) -> None:
    """The supervisor is a process of the host on which the command was typed."""
    arguments = ("--detach", "--no-torch", "-p", "1", "--lease", "4", "count.py", "9999", "0.1")
    detached = transport.run(*arguments)
    assert detached.code == 0, detached.err
    assert "supervised on this machine\n" in detached.err
    assert len(docker.containers()) == 2
    owner = detached.json("owner.json")
    transport.site.lab.exec("n1", ["kill", "-9", str(owner["pid"])])
    assert eventually(lambda: not docker.containers())
    assert eventually(lambda: not job_processes(transport.site)), job_processes(transport.site)


def job_processes(site: Site) -> list[str]:
    """Returns the processes on the hosts other than Docker's daemons."""
    lines = [line for group in site.processes().values() for line in group]
    return [line for line in lines if not re.search("^[^ ]*(dockerd|containerd)", line)]


CONDA = "/opt/conda"
# The part of conda's activate script that these tests need.
ACTIVATE = f"""export CONDA_PREFIX={CONDA}/envs/$1
export PATH=$CONDA_PREFIX/bin:$PATH
for script in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do source "$script"; done
"""


def write_conda(folder: Path, script: str) -> Path:
    """Writes an image's /opt/conda: an environment with this Python and an activation script."""
    own = folder / "envs" / "pytorch"
    for path, text in (
        (folder / "bin" / "activate", ACTIVATE),
        (own / "etc" / "conda" / "activate.d" / "own.sh", f"{script}\n"),
        (own / "bin" / "python", f'#!/bin/sh\nexport T_PYTHON=$0\nexec {sys.executable} "$@"\n'),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (own / "bin" / "python").chmod(0o755)
    return folder


# --- containers with sshd

PROGRAMS = (
    "/bin/sh", "/bin/bash", "/usr/bin/chown", "/usr/bin/grep", "/usr/bin/id", "/usr/bin/install",
    "/usr/bin/mkdir", "/usr/bin/ssh", "/usr/sbin/sshd", "/usr/sbin/useradd", "/usr/sbin/usermod",
)  # fmt: skip
# passwd of n1's base image: the set's user with another uid and home, and a user with the set's uid
CONFLICTING_USERS = "somebody:x:1000:0::/nowhere:/bin/sh\ndev:x:4321:0::/elsewhere:/bin/sh\n"
LAPTOP = "a-laptop"  # host name of the launching machine, which no host can resolve
PRINT_ENVIRONMENT = (
    "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK on $(hostname), uid $(id -u), "
    "at $MASTER_ADDR:$MASTER_PORT, $SAID, $OF_IMAGE, $WORDS words"
)


@pytest.fixture(scope="module")
def sets(cluster: tuple[Site, Docker]) -> Callable[..., Path]:
    """Returns a function that writes a set of containers whose ranks source a file.

    Its first call builds the image. The base image has what sshd needs; this machine's MPI is
    mounted. n1's base image, in which mpirun runs, already has a user ``dev``, like Intel's images;
    n2's has none.
    """
    site, docker = cluster
    sets_folder = docker.folder / "sets"
    sets_folder.mkdir()
    for name, users in (("n1", ROOT + CONFLICTING_USERS), ("n2", ROOT)):
        base = docker.folder / f"base-{name}.tar"
        write_image_with(base, PROGRAMS, {}, users)
        docker.tell(name, "import", "-c", "ENV PATH=/usr/sbin:/usr/bin", "-c",
                    "ENV OF_IMAGE=there", str(base), "base:1")  # fmt: skip

    def make(
        flavour: str, *arguments: str, command: Sequence[str] = ("sh", "-c", PRINT_ENVIRONMENT)
    ) -> Path:
        mpirun, first = Path(mpiexec(flavour)).with_name("mpirun"), not list(sets_folder.iterdir())
        if flavour != "intel":  # Debian's mpirun is that of MPICH or of Open MPI
            mpirun = sets_folder / flavour / "mpirun"
            mpirun.parent.mkdir(exist_ok=True)
            mpirun.write_text(f'#!/bin/sh\nexec /usr/bin/mpirun.{flavour} "$@"\n')
            mpirun.chmod(0o755)
        vars_sh = sets_folder / "vars.sh"
        vars_sh.write_text(f"export WORDS=$# PATH={mpirun.parent}:$PATH\n")
        seen = sorted({"/usr", str(sets_folder), str(mpirun.parents[1])})
        mounts = [f"--mount={item}:{item}:ro" for item in seen]
        own = ["--image=base:1", f"--activate={vars_sh}", "--env=SAID=a b", f"--mpi={flavour}"]
        out = sets_folder / f"set{len(list(sets_folder.iterdir()))}"
        own += [*mounts, *arguments, "--out", str(out), *command]
        Transport(site, ()).verb("setup", "containers", *own)
        lines = (out / "commands.sh").read_text().splitlines()
        build = next(line for line in lines if line.startswith("docker build"))
        for name in ("n1", "n2") if first else ():
            built = site.lab.exec(name, ["sh", "-c", build], cwd=out, timeout=TEST_LIMIT_S)
            built.check_returncode()
        return out

    return make


@pytest.mark.parametrize("flavour", ["intel", "openmpi"])
def test_mpirun_in_container_set(
    flavour: str, cluster: tuple[Site, Docker], docker: Docker, sets: Callable[..., Path]
) -> None:
    """Two workers; then ``mpirun -hosts localhost,worker`` with two ranks in each container."""
    site = cluster[0]
    n1, n2 = site.lab.address("n1"), site.lab.address("n2")
    common = f"uid 1000, at {n1}:29500, a b, there, 0 words"
    printed = run_set(site, sets(flavour, f"--worker=w1={n1}", f"--worker=w2={n2}"), "n1", "n2")
    assert printed == [f"rank 0 of 2, 0 on n1, {common}", f"rank 1 of 2, 0 on n2, {common}"]
    printed = run_set(site, sets(flavour, f"--launcher={n1}", f"--worker=w2={n2}", "-p2"), "n2")
    assert printed == [
        f"rank 0 of 4, 0 on {LAPTOP}, {common}",
        f"rank 1 of 4, 1 on {LAPTOP}, {common}",
        f"rank 2 of 4, 0 on n2, {common}",
        f"rank 3 of 4, 1 on n2, {common}",
    ]


def test_published_intel_demo_in_container_set(
    cluster: tuple[Site, Docker], docker: Docker, sets: Callable[..., Path]
) -> None:
    """Runs ``conda run -n pytorch 'source $(python …)/env/setvars.sh && mpirun … python …'``."""
    run_intel_demo(cluster[0], docker, sets, fetched(intels_demo.PUBLISHED))


def test_simplified_intel_demo_in_container_set(
    cluster: tuple[Site, Docker], docker: Docker, sets: Callable[..., Path]
) -> None:
    run_intel_demo(cluster[0], docker, sets, intels_demo.STAND_IN)


def run_intel_demo(site: Site, docker: Docker, sets: Callable[..., Path], script: Path) -> None:
    n1, n2 = site.lab.address("n1"), site.lab.address("n2")
    conda = write_conda(
        docker.folder / f"conda-{script.parent.name}", f"export PYTHONPATH={intels_demo.LIBRARIES}"
    )
    seen = {sys.prefix, sys.base_prefix, str(PARTS), str(intels_demo.HERE)} - {"/usr"}
    mounts = [f"--mount={item}:{item}:ro" for item in sorted(seen)]
    folder = sets(
        "intel", f"--launcher={n1}", f"--worker=w2={n2}", *mounts, f"--mount={conda}:{CONDA}:ro",
        "--activate=/workload/activate.sh", command=("python", *intels_demo.WORDS),
    )  # fmt: skip
    intels_demo.put_into(folder / "workload", script)
    (folder / "workload" / "activate.sh").write_text(
        f"source {CONDA}/bin/activate pytorch\n"
        'source $(python -c "import oneccl_bindings_for_pytorch as torch_ccl;'
        'print(torch_ccl.cwd)")/env/setvars.sh\n'
    )
    printed = run_set(site, folder, "n2")
    assert printed.count(":: oneCCL's variables are set") == 1
    assert len([line for line in printed if line.startswith("accuracy=")]) == 2, printed
    assert (folder / "workload" / "mnist_cnn.pt").exists()


def run_set(site: Site, folder: Path, *workers: str) -> list[str]:
    """Runs every line of commands.sh on the machine that it names; returns the ranks' output.

    A worker's machine has its own home, with only the files that the copy command brought.
    """
    places = {name: copy_to_host(site, name, folder) for name in workers}
    with contextlib.ExitStack() as stack:
        stack.callback(site.lab.exec, "n1", ["docker", "kill", "paceline-launcher"])
        for name in workers:
            line = line_of(folder, f"--name=paceline-w{name[1:]} ")
            stack.enter_context(site.lab.popen(name, ["sh", "-c", line], cwd=places[name]))
            stack.callback(site.lab.exec, name, ["docker", "kill", f"paceline-w{name[1:]}"])
            assert eventually(lambda n=name: has_sshd(site, n))
        line = line_of(folder, "docker run", "--name=paceline-launcher ")
        line = line.replace("--network=host", f"--network=host --hostname={LAPTOP}")
        process = site.lab.exec("n1", ["sh", "-c", line], cwd=folder, timeout=TEST_LIMIT_S)
    assert process.returncode == 0, process.stderr
    return sorted(process.stdout.splitlines())


def has_sshd(site: Site, host: str) -> bool:
    """Returns whether the worker's sshd listens."""
    return any(":1234" in address for address in site.lab.listeners(host))


def line_of(folder: Path, *arguments: str) -> str:
    lines = (folder / "commands.sh").read_text().splitlines()
    (line,) = [line for line in lines if all(word in line for word in arguments) and line[0] != "#"]
    return line


def copy_to_host(site: Site, host: str, folder: Path) -> Path:
    """Runs the copy command for a worker's machine; returns the folder on that machine."""
    address = site.lab.address(host)
    line = line_of(folder, "tar -cf", f"ssh {address} ")
    site.lab.exec("n1", ["sh", "-c", line], cwd=folder, timeout=TEST_LIMIT_S).check_returncode()
    place = site.lab.home(host) / folder.name
    own = f"ssh_worker-w{host[1:]}"
    assert sorted(path.name for path in place.glob("ssh_*")) == [own]
    return Path(site.lab.home_inside()) / folder.name
