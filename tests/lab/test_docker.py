"""Real Docker over SSH: the agent in a container on each host, no sshd in it."""

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
    """No container may be left after a test, in whatever state."""
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
    """A container a host."""


def test_an_image_that_one_host_lacks(transport: Transport, docker: Docker) -> None:
    docker.tell("n1", "tag", IMAGE, "only-here:1")
    options = [word.replace(IMAGE, "only-here:1") for word in transport.options]
    ended = Transport(transport.site, tuple(options)).run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "only-here:1 cannot be run on n2" in ended.err
    assert "the image is not there" in ended.err


def test_another_image_of_the_same_name(transport: Transport, docker: Docker) -> None:
    for name in ("n1", "n2"):  # imported twice: another date, so another image
        docker.tell(name, "import", str(docker.folder / "root.tar"), f"two:{name}")
        docker.tell(name, "tag", f"two:{name}", "twice:1")
    options = [word.replace(IMAGE, "twice:1") for word in transport.options]
    ended = Transport(transport.site, tuple(options)).run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "twice:1 is not the same image on all hosts" in ended.err


def test_the_wheel_installs_in_a_clean_container(docker: Docker) -> None:
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


def test_no_daemon(transport: Transport, docker: Docker) -> None:
    docker.stop("n2")
    try:
        ended = transport.run("--no-torch", "tell.py")
    finally:
        docker.start("n2")
    assert ended.code == 1
    assert "cannot be run on n2" in ended.err
    assert "the daemon is not running" in ended.err


def test_a_conda_environment_of_the_image(transport: Transport, docker: Docker) -> None:
    """Its interpreter by path; what its scripts set, by a file that activates it."""
    conda = write_conda(docker.folder / "conda-run", "export T_FROM=$CONDA_PREFIX")
    (transport.site.project / "conda.sh").write_text(f"source {CONDA}/bin/activate pytorch\n")
    python = ("--mount", f"{conda}:{CONDA}:ro", "--python", f"{CONDA}/envs/pytorch/bin/python")
    ended = transport.run(*python, "--activate", "conda.sh", "--no-torch", "-p", "1", "tell.py")
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        told = ended.said(rank)["env"]
        assert bytes.fromhex(told["T_FROM"]).decode() == f"{CONDA}/envs/pytorch"
        assert bytes.fromhex(told["T_PYTHON"]).decode() == f"{CONDA}/envs/pytorch/bin/python"


def test_left_it_goes_on_in_its_containers(transport: Transport, docker: Docker) -> None:
    """Watched by a host, from outside of the containers; stopped from where it was started.

    The supervisor's host gets another container when its own is lost.
    """
    words = ("--detach", "--supervisor", "n2", "--no-torch", "-p", "1", "member.py", "9999")
    left = transport.run(*words)
    assert left.code == 0, left.err
    assert "continues without this command, supervised on n2\n" in left.err
    back = left.json("detached.json")
    there = transport.site.lab.home("n2") / ".cache/paceline/detached" / back["run_id"]
    logs = [there / f"run/logs/n{rank + 1}/{rank}.log" for rank in (0, 1)]
    assert all(eventually(lambda log=log: "began" in log.read_text()) for log in logs)  # type: ignore[misc]
    docker.tell("n2", "kill", *docker.tell("n2", "ps", "--quiet").split())
    assert eventually(lambda: "joined" in logs[1].read_text())
    assert len(docker.containers()) == 2
    assert transport.verb("status", str(left.directory)).startswith(f"{left.directory}: running")
    transport.verb("stop", str(left.directory))
    assert eventually(lambda: not there.exists())
    assert left.json("result.json")["interrupted"] == signal.SIGTERM
    assert "saved at" in (left.directory / "logs/n1/0.log").read_text()
    assert eventually(lambda: not ours(transport.site)), ours(transport.site)


def test_left_it_ends_with_its_supervisor(transport: Transport, docker: Docker) -> None:
    """Which here is a process of the host on which the command was typed."""
    words = ("--detach", "--no-torch", "-p", "1", "--lease", "4", "count.py", "9999", "0.1")
    left = transport.run(*words)
    assert left.code == 0, left.err
    assert "supervised on this machine\n" in left.err
    assert len(docker.containers()) == 2
    owner = left.json("owner.json")
    transport.site.lab.exec("n1", ["kill", "-9", str(owner["pid"])])
    assert eventually(lambda: not docker.containers())
    assert eventually(lambda: not ours(transport.site)), ours(transport.site)


def ours(site: Site) -> list[str]:
    """What runs on the hosts besides the daemons."""
    lines = [line for found in site.processes().values() for line in found]
    return [line for line in lines if not re.search("^[^ ]*(dockerd|containerd)", line)]


CONDA = "/opt/conda"
# A little of what conda's own does when it is sourced with the name of an environment
ACTIVATE = f"""export CONDA_PREFIX={CONDA}/envs/$1
export PATH=$CONDA_PREFIX/bin:$PATH
for script in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do source "$script"; done
"""


def write_conda(folder: Path, script: str) -> Path:
    """What an image has in /opt/conda: an environment with this Python, and a script of its own."""
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


# --- containers with sshd inside

PROGRAMS = (
    "/bin/sh", "/bin/bash", "/usr/bin/chown", "/usr/bin/grep", "/usr/bin/id", "/usr/bin/install",
    "/usr/bin/mkdir", "/usr/bin/ssh", "/usr/sbin/sshd", "/usr/sbin/useradd", "/usr/sbin/usermod",
)  # fmt: skip
# of n1's base: the set's user with another uid and home, and somebody who has its uid
TAKEN = "somebody:x:1000:0::/nowhere:/bin/sh\ndev:x:4321:0::/elsewhere:/bin/sh\n"
LAPTOP = "a-laptop"  # what the launching machine is called; nobody can resolve it
TELL = (
    "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK on $(hostname), uid $(id -u), "
    "at $MASTER_ADDR:$MASTER_PORT, $SAID, $OF_IMAGE, $WORDS words"
)


@pytest.fixture(scope="module")
def sets(cluster: tuple[Site, Docker]) -> Callable[..., Path]:
    """Writes a set whose ranks source a file; the image is built with the first of them.

    The base has what sshd needs; MPI is this machine's, mounted. That of n1, where mpirun is
    typed, has a user ``dev`` already, as Intel's has, and that of n2 none.
    """
    site, docker = cluster
    home = docker.folder / "sets"
    home.mkdir()
    for name, users in (("n1", ROOT + TAKEN), ("n2", ROOT)):
        base = docker.folder / f"base-{name}.tar"
        write_image_with(base, PROGRAMS, {}, users)
        docker.tell(name, "import", "-c", "ENV PATH=/usr/sbin:/usr/bin", "-c",
                    "ENV OF_IMAGE=there", str(base), "base:1")  # fmt: skip

    def make(flavour: str, *words: str, command: Sequence[str] = ("sh", "-c", TELL)) -> Path:
        mpirun, first = Path(mpiexec(flavour)).with_name("mpirun"), not list(home.iterdir())
        if flavour != "intel":  # Debian's mpirun is the one or the other
            mpirun = home / flavour / "mpirun"
            mpirun.parent.mkdir(exist_ok=True)
            mpirun.write_text(f'#!/bin/sh\nexec /usr/bin/mpirun.{flavour} "$@"\n')
            mpirun.chmod(0o755)
        vars_sh = home / "vars.sh"
        vars_sh.write_text(f"export WORDS=$# PATH={mpirun.parent}:$PATH\n")
        seen = sorted({"/usr", str(home), str(mpirun.parents[1])})
        mounts = [f"--mount={one}:{one}:ro" for one in seen]
        own = ["--image=base:1", f"--activate={vars_sh}", "--env=SAID=a b", f"--mpi={flavour}"]
        out = home / f"set{len(list(home.iterdir()))}"
        own += [*mounts, *words, "--out", str(out), *command]
        Transport(site, ()).verb("setup", "containers", *own)
        lines = (out / "commands.sh").read_text().splitlines()
        build = next(line for line in lines if line.startswith("docker build"))
        for name in ("n1", "n2") if first else ():
            built = site.lab.exec(name, ["sh", "-c", build], cwd=out, timeout=TEST_LIMIT_S)
            built.check_returncode()
        return out

    return make


@pytest.mark.parametrize("flavour", ["intel", "openmpi"])
def test_mpirun_inside_a_matched_set(
    flavour: str, cluster: tuple[Site, Docker], docker: Docker, sets: Callable[..., Path]
) -> None:
    """Two workers, and then ``mpirun -hosts localhost,worker`` with two ranks in each."""
    site = cluster[0]
    n1, n2 = site.lab.address("n1"), site.lab.address("n2")
    rest = f"uid 1000, at {n1}:29500, a b, there, 0 words"
    said = runs(site, sets(flavour, f"--worker=w1={n1}", f"--worker=w2={n2}"), "n1", "n2")
    assert said == [f"rank 0 of 2, 0 on n1, {rest}", f"rank 1 of 2, 0 on n2, {rest}"]
    said = runs(site, sets(flavour, f"--launcher={n1}", f"--worker=w2={n2}", "-p2"), "n2")
    assert said == [
        f"rank 0 of 4, 0 on {LAPTOP}, {rest}",
        f"rank 1 of 4, 1 on {LAPTOP}, {rest}",
        f"rank 2 of 4, 0 on n2, {rest}",
        f"rank 3 of 4, 1 on n2, {rest}",
    ]


def test_the_demo_of_intels_containers_in_a_set(
    cluster: tuple[Site, Docker], docker: Docker, sets: Callable[..., Path]
) -> None:
    """``conda run -n pytorch 'source $(python …)/env/setvars.sh && mpirun … python …'`` there."""
    run_intels_demo_in_a_set(cluster[0], docker, sets, fetched(intels_demo.PUBLISHED))


def test_our_stand_in_for_the_demo_of_intels_containers_in_a_set(
    cluster: tuple[Site, Docker], docker: Docker, sets: Callable[..., Path]
) -> None:
    run_intels_demo_in_a_set(cluster[0], docker, sets, intels_demo.STAND_IN)


def run_intels_demo_in_a_set(
    site: Site, docker: Docker, sets: Callable[..., Path], script: Path
) -> None:
    n1, n2 = site.lab.address("n1"), site.lab.address("n2")
    conda = write_conda(
        docker.folder / f"conda-{script.parent.name}", f"export PYTHONPATH={intels_demo.LIBRARIES}"
    )
    seen = {sys.prefix, sys.base_prefix, str(PARTS), str(intels_demo.HERE)} - {"/usr"}
    mounts = [f"--mount={one}:{one}:ro" for one in sorted(seen)]
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
    said = runs(site, folder, "n2")
    assert said.count(":: oneCCL's variables are set") == 1
    assert len([line for line in said if line.startswith("accuracy=")]) == 2, said
    assert (folder / "workload" / "mnist_cnn.pt").exists()


def runs(site: Site, folder: Path, *workers: str) -> list[str]:
    """What ranks say. Every line of commands.sh, on the machine that it names.

    A worker's machine has only what the copy line brought into the home that it has for itself.
    """
    places = {name: copied(site, name, folder) for name in workers}
    with contextlib.ExitStack() as stack:
        stack.callback(site.lab.exec, "n1", ["docker", "kill", "paceline-launcher"])
        for name in workers:
            line = line_of(folder, f"--name=paceline-w{name[1:]} ")
            stack.enter_context(site.lab.popen(name, ["sh", "-c", line], cwd=places[name]))
            stack.callback(site.lab.exec, name, ["docker", "kill", f"paceline-w{name[1:]}"])
            assert eventually(lambda n=name: has_sshd(site, n))
        line = line_of(folder, "docker run", "--name=paceline-launcher ")
        line = line.replace("--network=host", f"--network=host --hostname={LAPTOP}")
        done = site.lab.exec("n1", ["sh", "-c", line], cwd=folder, timeout=TEST_LIMIT_S)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def has_sshd(site: Site, host: str) -> bool:
    """Whether the worker's own sshd listens."""
    return any(":1234" in address for address in site.lab.listeners(host))


def line_of(folder: Path, *words: str) -> str:
    lines = (folder / "commands.sh").read_text().splitlines()
    (line,) = [line for line in lines if all(word in line for word in words) and line[0] != "#"]
    return line


def copied(site: Site, host: str, folder: Path) -> Path:
    """The folder on a worker's machine, as the copy line has made it."""
    address = site.lab.address(host)
    line = line_of(folder, "tar -cf", f"ssh {address} ")
    site.lab.exec("n1", ["sh", "-c", line], cwd=folder, timeout=TEST_LIMIT_S).check_returncode()
    place = site.lab.home(host) / folder.name
    own = f"ssh_worker-w{host[1:]}"
    assert sorted(path.name for path in place.glob("ssh_*")) == [own]
    return Path(site.lab.home_inside()) / folder.name
