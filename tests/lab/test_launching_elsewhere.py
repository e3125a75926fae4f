"""Tests a launching machine without Linux; a stand-in for macOS, which the tests do not have.

``paceline`` runs in a mount namespace with an empty ``/proc`` and ``/sys``. Its Python has no
netlink, pidfd, epoll, ``prctl`` and so on, and calls itself Darwin (see ``elsewhere/``). Its PATH
has only the programs that it needs. The lab's hosts run Linux.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launches import SOURCE, TEST_LIMIT_S, TIMEOUT_S, Ended, Site, eventually, project_at

pytestmark = pytest.mark.lab

NON_LINUX_STUBS = Path(__file__).with_name("elsewhere")
PROGRAMS = ("sh", "ssh", "ssh-add", "ssh-keygen", "git")
_HIDE = """
mount --make-rprivate / && mount --bind /proc "$TEST_PROC" && mount -t tmpfs none /proc &&
mount -t tmpfs none /sys && mount -t tmpfs -o size=4k none /dev/shm && PATH="$TEST_PATH" exec "$@"
"""
# the lab's program that enters a host needs /proc, and gets it back
_PROXY_WITH_PROC = "{unshare} -m {sh} -c '{umount} /proc; exec \"$@\"' sh ".format(
    **{program: shutil.which(program) for program in ("unshare", "sh", "umount")}
)


@dataclass
class NonLinuxMachine:
    """A machine without Linux, from which the lab's hosts are reached."""

    site: Site
    folder: Path

    @classmethod
    def beside(cls, site: Site, folder: Path) -> NonLinuxMachine:
        (folder / "proc").mkdir(parents=True)
        (folder / "bin").mkdir()
        for program in PROGRAMS:
            (folder / "bin" / program).symlink_to(str(shutil.which(program)))
        config = site.lab.ssh_config.read_text()
        config_with_proc = config.replace("ProxyCommand ", f"ProxyCommand {_PROXY_WITH_PROC}")
        assert config_with_proc != config
        (folder / "ssh_config").write_text(config_with_proc)
        return cls(site, folder)

    def start(self, verb: str, *args: str, hosts: bool = True) -> subprocess.Popen[str]:
        host_options = [
            "-H",
            str(self.site.lab.hostfile),
            "--ssh-config",
            str(self.folder / "ssh_config"),
        ]
        argv = [
            sys.executable,
            "-m",
            "paceline",
            *verb.split(),
            *(host_options if hosts else []),
            *args,
        ]
        return subprocess.Popen(
            ["unshare", "-m", "sh", "-c", _HIDE, "sh", *argv],
            cwd=self.site.project,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{NON_LINUX_STUBS}:{SOURCE}",
                "TEST_PROC": str(self.folder / "proc"),
                "TEST_PATH": str(self.folder / "bin"),
            },
        )

    def paceline(self, verb: str, *args: str, hosts: bool = True) -> Ended:
        with self.start(verb, *args, hosts=hosts) as child:
            try:
                out, err = child.communicate(timeout=TEST_LIMIT_S)
            except BaseException:
                child.kill()
                raise
        assert "src/paceline/" not in err, err  # a traceback of Paceline's code
        return Ended(child.returncode, out, err, Path())


@pytest.fixture(scope="module")
def mac(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NonLinuxMachine]:
    folder = tmp_path_factory.mktemp("elsewhere")
    site = Site(new_lab(hosts=2), project_at(folder / "project"))
    yield NonLinuxMachine.beside(site, folder / "mac")
    assert site.leftovers() == ""


def test_stand_in_lacks_linux_interfaces(mac: NonLinuxMachine) -> None:
    """Checks that the stand-in really lacks what it should lack."""
    probe = (
        "import ctypes, os, select, socket, sys; print(sys.platform, os.uname().sysname, "
        "os.listdir('/proc'), hasattr(socket, 'AF_NETLINK'), hasattr(os, 'pidfd_open'), "
        "hasattr(select, 'epoll'), hasattr(ctypes.CDLL(None), 'prctl'))"
    )
    script = mac.folder / "ask.py"
    script.write_text(probe)
    argv = [sys.executable, str(script), "paceline"]
    env = {**os.environ, "PYTHONPATH": str(NON_LINUX_STUBS), "TEST_PROC": str(mac.folder / "proc"),
           "TEST_PATH": "/nowhere"}  # fmt: skip
    output = subprocess.check_output(
        ["unshare", "-m", "sh", "-c", _HIDE, "sh", *argv], env=env, text=True
    )
    assert output.split() == ["darwin", "Darwin", "[]", "False", "False", "False", "False"]


def test_run_status_logs_and_explain(mac: NonLinuxMachine) -> None:
    run = mac.paceline("run", "--run-dir", "well", "--no-torch", "tell.py", "a b")
    assert run.code == 0, run.err
    assert [run.said(rank)["argv"][-1] for rank in (0, 1)] == 2 * [b"a b".hex()]
    assert "finished, exit status 0" in mac.paceline("status", "well", hosts=False).out
    logs = mac.paceline("logs", "well", hosts=False)
    assert logs.code == 0
    assert logs.out.count('"argv"') == 2
    assert mac.paceline("explain", "well", hosts=False).code == 0


def test_explains_failure(mac: NonLinuxMachine) -> None:
    run = mac.paceline("run", "--run-dir", "ill", "--no-torch", "end.py", "raise", "1")
    assert run.code == 1, run.err
    assert "failed first: rank 1 on n2" in run.err
    assert "rank 1" in mac.paceline("explain", "ill", hosts=False).out


def test_status_and_stop_from_second_terminal(mac: NonLinuxMachine) -> None:
    args = ["--run-dir", "long", "--no-torch", "end.py", "wait"]
    with mac.start("run", *args) as run:
        try:
            result = mac.site.project / "long" / "logs" / "n2" / "1.log"
            assert eventually(result.exists), run.communicate(timeout=1)
            assert "long: running" in mac.paceline("status", "long", hosts=False).out
            second = mac.paceline("run", *args)
            assert second.code == 2
            assert "in use" in second.err
            stop = mac.paceline("stop", "long", hosts=False)
            assert (stop.code, stop.err) == (0, "long: stopped\n")
            run.communicate(timeout=TIMEOUT_S)
        finally:
            run.kill()
    assert run.returncode == 143


def test_killed_launcher_frees_run_directory(mac: NonLinuxMachine) -> None:
    with mac.start("run", "--run-dir", "lost", "--no-torch", "end.py", "wait") as run:
        result = mac.site.project / "lost" / "logs" / "n2" / "1.log"
        assert eventually(result.exists)
        run.kill()
        run.communicate()
    assert "lost: lost" in mac.paceline("status", "lost", hosts=False).out
    rerun = mac.paceline("run", "--run-dir", "lost", "--no-torch", "tell.py")
    assert rerun.code == 0, rerun.err


def test_hosts_check_plan_and_setup_dry_run(mac: NonLinuxMachine) -> None:
    hosts = mac.paceline("hosts", str(mac.site.lab.hostfile), hosts=False)
    assert hosts.code == 0
    assert "n2" in hosts.out
    check = mac.paceline("check", "--no-torch", "--plain")
    assert check.code == 0, check.out + check.err
    plan = mac.paceline("run", "--no-torch", "--plan", "--json", "tell.py")
    assert [node["host"] for node in json.loads(plan.out)["nodes"]] == ["n1", "n2"]
    setup = mac.paceline("setup", "--dry-run")
    assert setup.code == 0, setup.out + setup.err


def test_local_run_and_lab_report_linux_required(mac: NonLinuxMachine) -> None:
    local = mac.paceline("run", "--no-torch", "tell.py", hosts=False)
    assert local.code != 0
    assert "this is darwin" in local.err
    assert "-H n1,n2" in local.err
    lab = mac.paceline("lab up", hosts=False)
    assert lab.code != 0
    assert "a lab needs Linux" in lab.err
