"""Runs real Slurm on lab hosts: munge and slurmd on every host, the controller on n1."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import cgroups
from launches import eventually
from transports import missing

from paceline.lab import Lab

SOCKET = "/run/munge/munge.socket.2"
START_S = 60.0
# resources that each host claims to have: those of the site in the guide
CPUS, MEMORY = 16, 32768  # MB
GPUS = "gpu:v100:2"

_CONFIG = """
ClusterName=lab
SlurmctldHost=n1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir=/var/tmp/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%h.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdTimeout=10
KillWait=10
MinJobAge=300
Waittime=0
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={names} CPUs={cpus} RealMemory={memory} Gres={gpus} Feature=v100 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
_GROUND = (
    "mkdir -p /run/munge /var/tmp/slurmd /var/tmp/munge && chmod 755 /run/munge && "
    + cgroups.mounting(["freezer"])
)


def require() -> None:
    """Skips the test unless Slurm and munge are installed."""
    tools = ("slurmctld", "slurmd", "munged", "srun", "sbatch")
    if lacking := [t for t in tools if shutil.which(t, path="/usr/sbin:/usr/bin") is None]:
        missing(f"not installed: {', '.join(lacking)}")


class Slurm:
    """Controls the Slurm daemons of one lab.

    Attributes:
        env: Variables that every command needs.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, list[subprocess.Popen[bytes]]] = {}

    def up(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        config = _CONFIG.format(socket=SOCKET, folder=self.folder, names=",".join(self.lab.names),
                                cpus=CPUS, memory=MEMORY, gpus=GPUS)  # fmt: skip
        (self.folder / "slurm.conf").write_text(config)
        for number in range(2):  # files in place of GPU devices
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(
            f"NodeName={','.join(self.lab.names)} Name=gpu Type=v100 File={self.folder}/gpu[0-1]\n"
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        for name in self.lab.names:
            self.start(name)
        ready = f"idle {len(self.lab.names)}"
        assert eventually(lambda: ready in self.tell("sinfo", "-h", "-o", "%T %D"), START_S)

    def start(self, name: str) -> None:
        """Starts the daemons of one host."""
        self.lab.exec(name, ["sh", "-c", _GROUND], check=True, timeout=START_S)
        munge = ["/usr/sbin/munged", "--force", "--foreground", "--key-file",
                 str(self.folder / "munge.key"), "--socket", SOCKET,
                 "--pid-file", "/run/munge/munged.pid", "--log-file", "/var/tmp/munge/log",
                 "--seed-file", "/var/tmp/munge/seed"]  # fmt: skip
        daemons = self._daemons.setdefault(name, [])
        daemons.append(self._popen(name, munge))
        there = ["test", "-S", SOCKET]
        assert eventually(lambda: self.lab.exec(name, there).returncode == 0)
        config = self.env["SLURM_CONF"]
        if name == self.lab.names[0]:
            daemons.append(self._popen(name, ["/usr/sbin/slurmctld", "-D", "-c", "-f", config]))
        daemons.append(self._popen(name, ["/usr/sbin/slurmd", "-D", "-f", config]))

    def _popen(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        nothing = subprocess.DEVNULL
        return self.lab.popen(name, argv, env=self.env, stdin=nothing, stdout=nothing,
                              stderr=nothing, cwd="/")  # fmt: skip

    def down(self) -> None:
        every = [daemon for daemons in self._daemons.values() for daemon in daemons]
        for daemon in reversed(every):
            daemon.terminate()
        for daemon in every:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()

    def tell(self, *argv: str, host: str = "n1") -> str:
        """Runs a Slurm command on a host and returns its output."""
        return self.lab.exec(host, argv, env=self.env, timeout=START_S).stdout

    def job(self, number: str) -> str:
        return self.tell("scontrol", "show", "job", "-o", number)

    @contextlib.contextmanager
    def allocation(self, nodes: int = 2, names: str = "n[1-2]") -> Iterator[dict[str, str]]:
        """Allocates nodes without a shell; yields the variables that the shell would have."""
        argv = ["salloc", "--no-shell", f"-N{nodes}", f"--nodelist={names}", "--mem=100"]
        done = self.lab.exec("n1", argv, env=self.env, timeout=START_S)
        number = done.stderr.rsplit(maxsplit=1)[-1]
        assert number.isdigit(), done.stderr
        try:
            yield {**self.env, "SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": names}
        finally:
            self.tell("scancel", number)

    def left(self) -> str:
        """Describes unfinished jobs and steps, and processes other than the daemons."""
        queue = self.tell("squeue", "-h", "-o", "%i %T").strip()
        daemons = ("munged", "slurmctld", "slurmd", "slurmscriptd")
        found = {
            name: [c for _, c in self.lab.processes(name) if not any(d in c for d in daemons)]
            for name in self.lab.names
        }
        return queue + str({name: lines for name, lines in found.items() if lines} or "")


@contextlib.contextmanager
def slurm_on(lab: Lab, folder: Path) -> Iterator[Slurm]:
    """Starts Slurm in a lab, and stops it afterwards."""
    require()
    slurm = Slurm(lab, folder)
    began = time.monotonic()
    try:
        slurm.up()
        assert time.monotonic() - began < 2 * START_S
        yield slurm
    finally:
        slurm.down()
        cgroups.remove("slurm*")
