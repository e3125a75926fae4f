"""Launcher and workers as containers with sshd, for mpirun inside: every file from one value.

Each path, alias, port and key occurs once in :class:`ContainerSet` and is derived from there, so
that what one file says is what the others expect.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.remote.interfaces import EXACT
from paceline.spec.command import shell_text
from paceline.spec.errors import NodeError

USER, UID = "dev", 1000
HOME = f"/home/{USER}"
WORK = "/workload"
FIRST_PORT = 12345
KEY = "id_ed25519"
HOST_KEY = "ssh_host_ed25519_key"
RANK = "/opt/paceline/rank"
SSHD = "/opt/paceline/sshd"
MPIS = ("intel", "mpich", "openmpi")
# whose GPUs → devices, folders and flags of the engine; AMD's and Intel's need groups as well
_DRI = ("/dev/dri",)
DEVICES = {
    "intel": _DRI,
    "amd": ("/dev/kfd", *_DRI),
    "nvidia": (),
    "cdi": ("nvidia.com/gpu=all",),
}
BY_PATH = "/dev/dri/by-path"  # by which Level Zero tells cards apart; --device does not bring it
# Each machine's own numbers, so found where the line is typed; older ones have no ``render``
_GROUP_ID = "_GROUP_ID"
_VIDEO = "${VIDEO_GROUP_ID:?type the line for .env of commands.sh first}"
_RENDER = "${RENDER_GROUP_ID:-${VIDEO_GROUP_ID}}"
_GROUPS = """$(getent group render video | cut -d: -f3 | sed 's/^/--group-add=/')"""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker container.

    Attributes:
        alias: What ssh and mpirun call it.
        address: Of the machine that it runs on.
        port: Of its sshd there.
    """

    alias: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class ContainerSet:
    """A launcher's container and its workers'.

    Attributes:
        base: Image that has Python, torch and MPI.
        image: Name of the image that the Containerfile makes of it.
        workers: In the order of the ranks.
        shm_size: Size of /dev/shm.
        interface: Interface for MPI's traffic; empty leaves it to MPI.
        command: What mpirun runs.
        mpi: Whose mpirun the image has.
        launcher: Address of the launching machine where its container is to be a rank, too; then
            it holds rank 0.
        processes: Ranks a container.
        master_port: Port at which the ranks meet, on the machine of rank 0.
        env: Variables for the ranks.
        activate: Scripts in the image that are sourced before mpirun and each rank.
        gpus: Whose GPUs the containers see, and how; empty for none.
        mounts: Further folders, ``SOURCE:TARGET[:ro]`` each.
        uid: Of the user in the containers, to whom the keys on the machines must belong.
        folder: Name of the set's folder, also in the home of each worker's machine.
    """

    base: str
    image: str
    workers: tuple[Worker, ...]
    shm_size: str = "8g"
    interface: str = ""
    command: tuple[str, ...] = ("python", "train.py")
    mpi: str = "mpich"
    launcher: str = ""
    processes: int = 1
    master_port: int = 29500
    env: Mapping[str, str] = field(default_factory=dict)
    activate: tuple[str, ...] = ()
    gpus: str = ""
    mounts: tuple[str, ...] = ()
    uid: int = UID
    folder: str = "paceline-containers"

    @property
    def places(self) -> tuple[str, ...]:
        """What mpirun calls the containers with ranks, rank 0 first."""
        here = ("localhost",) if self.launcher else ()
        return (*here, *(worker.alias for worker in self.workers))

    @property
    def master(self) -> str:
        """Address of the machine with rank 0."""
        return self.launcher or self.workers[0].address


@dataclass(frozen=True, slots=True)
class Keys:
    """Public halves; the private ones are only copied.

    Attributes:
        identity: The launcher's, one line.
        hosts: Each worker's host key by alias, type and key.
    """

    identity: str
    hosts: Mapping[str, str]


def workers_of(addresses: Mapping[str, str], first_port: int = FIRST_PORT) -> tuple[Worker, ...]:
    """Workers by alias; each has a port of its own, so that two may share a machine."""
    return tuple(
        Worker(alias, address, first_port + number)
        for number, (alias, address) in enumerate(addresses.items())
    )


def files(made: ContainerSet, keys: Keys) -> dict[str, str]:
    """Path below the folder → content. Key files themselves are not among them."""
    found = {
        "Containerfile": containerfile(made),
        "compose.yaml": json.dumps(compose(made), indent=2) + "\n",
        "hostfile": "".join(f"{place}\n" for place in made.places),
        "rank.sh": rank_script(made),
        "sshd.sh": SSHD_SCRIPT,
        "commands.sh": commands(made),
        "ssh_launcher/config": ssh_config(made),
        "ssh_launcher/known_hosts": known_hosts(made, keys),
    }
    for worker in made.workers:
        folder = folder_of(worker)
        found[f"{folder}/sshd_config"] = sshd_config(worker)
        found[f"{folder}/authorized_keys"] = f"restrict,pty {keys.identity}\n"
    return found


def folder_of(worker: Worker) -> str:
    return f"ssh_worker-{worker.alias}"


def containerfile(made: ContainerSet) -> str:
    """The base with OpenSSH and an ordinary user; keys are mounted, never built in.

    A user of this name that the base has gets our uid and home. Whoever else has the uid comes
    after it in ``passwd``: what looks up a uid, as ssh for its config, takes the first.
    """
    return f"""FROM {made.base}
USER root
RUN if [ -x /usr/sbin/sshd ]; then :; \\
    elif command -v apt-get >/dev/null; then \\
      apt-get update && apt-get install -y --no-install-recommends openssh-server openssh-client \\
      && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*; \\
    else dnf install -y openssh-server openssh-clients && rm -f /etc/ssh/ssh_host_*; fi; \\
    mkdir -p /run/sshd {WORK} && \\
    if id -u {USER} >/dev/null 2>&1; then \\
      usermod --non-unique --uid {made.uid} --home {HOME} {USER}; \\
    else useradd --non-unique --uid {made.uid} --create-home --home-dir {HOME} {USER}; fi && \\
    found="$(grep '^{USER}:' /etc/passwd; grep -v '^{USER}:' /etc/passwd)" && \\
    printf '%s\\n' "$found" >/etc/passwd && \\
    mkdir -p {HOME} && chown {made.uid} {HOME} && install -d -o {made.uid} -m 700 {HOME}/.ssh
USER {USER}
WORKDIR {WORK}
"""


def rank_script(made: ContainerSet) -> str:
    """Around mpirun and around each rank: the image's environment, and torchrun's variables.

    mpirun passes its environment on in some MPIs, so that what was sourced once is not again.
    """
    sourced = [f". {shell_text([script])} || exit" for script in made.activate]
    once = [
        "activate() {",  # a function, so that no script takes the command for its own arguments
        *sourced,
        "}",
        'if [ -z "$PACELINE_ACTIVATED" ]; then activate; export PACELINE_ACTIVATED=1; fi',
    ] * bool(sourced)
    shell = "/bin/bash" if sourced else "/bin/sh"
    return "\n".join([f"#!{shell}", *once, *_called_back(made), _PLACE, 'exec "$@"', ""])


def _called_back(made: ContainerSet) -> list[str]:
    """Hydra has the workers call back by this machine's name, MPICH perhaps by ``localhost``.

    Neither need lead here from there. How a worker sees our address, ssh can say.
    """
    if made.mpi == "openmpi" or made.interface:
        return []
    asked = f"$(ssh -n {made.workers[0].alias} 'echo \"${{SSH_CONNECTION%% *}}\"')"
    return [
        'if [ "$1" = mpirun ]; then',
        f"own={shell_text([made.launcher]) if made.launcher else asked} || exit",
        f'card=$(python3 -c {shell_text([_CARD])} "$own")',
        'if [ -n "$card" ]; then shift; set -- mpirun -iface "$card" "$@"; fi',
        "fi",
    ]


# the interface that has an address
_CARD = """import fcntl, socket, struct, sys
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _, name in socket.if_nameindex():
    try:
        said = fcntl.ioctl(asking, 0x8915, struct.pack("256s", name.encode()))
    except OSError:
        continue
    if socket.inet_ntoa(said[20:24]) == socket.gethostbyname(sys.argv[1]):
        print(name)
        break"""

_PLACE = """rank=${OMPI_COMM_WORLD_RANK:-${MV2_COMM_WORLD_RANK:-$PMI_RANK}}
if [ -n "$rank" ]; then
size=${OMPI_COMM_WORLD_SIZE:-${MV2_COMM_WORLD_SIZE:-$PMI_SIZE}}
local=${OMPI_COMM_WORLD_LOCAL_RANK:-${MV2_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-0}}}
here=${OMPI_COMM_WORLD_LOCAL_SIZE:-${MV2_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-1}}}
export RANK=$rank WORLD_SIZE=$size LOCAL_RANK=$local LOCAL_WORLD_SIZE=$here
export PMI_RANK=$rank PMI_SIZE=$size MPI_LOCALRANKID=$local MPI_LOCALNRANKS=$here
fi"""


# In the foreground, so that the container ends with it. What logs in gets the container's
# environment, where the image says on which PATH its MPI, Python and libraries are.
SSHD_SCRIPT = r"""#!/bin/sh
while IFS= read -r pair; do
case $pair in
HOME=*|HOSTNAME=*|PWD=*|SHLVL=*|_=*|*\"*|*\\*) ;;
[A-Za-z_]*=*) given="$given \"$pair\"" ;;
esac
done <<END
$(env)
END
exec /usr/sbin/sshd -D -e "$@" -o "SetEnv$given"
"""


def sshd_config(worker: Worker) -> str:
    """An sshd without root: its own port, host key, log and pid file; keys only."""
    ssh = f"{HOME}/.ssh"
    return f"""Port {worker.port}
{_listening(worker.address)}HostKey {ssh}/{HOST_KEY}
AuthorizedKeysFile {ssh}/authorized_keys
PidFile /tmp/paceline-sshd.pid
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PermitRootLogin no
AllowTcpForwarding no
PrintMotd no
LogLevel INFO
"""


def _listening(address: str) -> str:
    """Only where the launcher comes from; a name may mean loopback on its own machine."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return ""
    return f"ListenAddress {address}\n"


def ssh_config(made: ContainerSet) -> str:
    """How the launcher's container reaches each worker."""
    lines = []
    for worker in made.workers:
        lines += [
            f"Host {worker.alias}",
            f"    HostName {worker.address}",
            f"    Port {worker.port}",
            f"    User {USER}",
            f"    HostKeyAlias {worker.alias}",
            f"    IdentityFile {HOME}/.ssh/{KEY}",
            "    IdentitiesOnly yes",
        ]
    ssh = f"{HOME}/.ssh"
    common = ["Host *", "    BatchMode yes", "    StrictHostKeyChecking yes",
              f"    UserKnownHostsFile {ssh}/known_hosts"]  # fmt: skip
    return "\n".join([*lines, *common]) + "\n"


def known_hosts(made: ContainerSet, keys: Keys) -> str:
    return "".join(f"{worker.alias} {keys.hosts[worker.alias]}\n" for worker in made.workers)


def sshd_command() -> list[str]:
    return [SSHD, "-f", f"{HOME}/.ssh/sshd_config"]


def mpirun_command(made: ContainerSet) -> list[str]:
    """As many processes in each container; the interface as MPI wants it told."""
    each, total = str(made.processes), str(made.processes * len(made.places))
    if made.mpi == "openmpi":  # passes on only what it is told to
        hosts = ",".join(f"{place}:{each}" for place in made.places)
        nets = ("oob_tcp_if_include", "btl_tcp_if_include") if made.interface else ()
        mca = [word for name in nets for word in ("--mca", name, made.interface)]
        passed = [word for name in environment(made) for word in ("-x", name)]
        head = ["--host", hosts, "-np", total, "--map-by", f"ppr:{each}:node", "--bind-to", "none"]
        return [RANK, "mpirun", *mca, *head, *passed, RANK, *made.command]
    interface = ["-iface", made.interface] if made.interface else []
    hosts = ",".join(made.places)
    head = ["mpirun", *interface, "-hosts", hosts, "-ppn", each, "-n", total]
    return [RANK, *head, RANK, *made.command]


def environment(made: ContainerSet) -> dict[str, str]:
    """Of the launcher's container, from which mpirun gives it to the ranks."""
    found = {"MASTER_ADDR": made.master, "MASTER_PORT": str(made.master_port)}
    if made.interface:
        names = (*EXACT, "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES")
        found |= dict.fromkeys(names, made.interface)
    return {**found, **made.env}


def run_line(made: ContainerSet, name: str, ssh_folder: str, words: list[str]) -> str:
    """``docker run`` for one container, typed in the folder of the set."""
    flags = ["docker", "run", "--rm", "--init", "--network=host", f"--name={name}"]
    flags += [f"--user={made.uid}", f"--shm-size={made.shm_size}", f"--workdir={WORK}"]
    flags += [f"--env={name}={value}" for name, value in environment(made).items()]
    flags += [f"--device={device}" for device in DEVICES.get(made.gpus, ())]
    flags += ["--gpus=all"] if made.gpus == "nvidia" else []
    line = shell_text(flags)
    if made.gpus in ("intel", "amd"):
        line += f" {_GROUPS}"
    for volume in volumes(made, ssh_folder):  # docker takes a relative path from version 23 on only
        here = '"$PWD"' if volume.startswith("./") else ""
        line += f" --volume {here}{shell_text([volume[1:] if here else volume])}"
    return f"{line} {shell_text([made.image, *words])}"


def volumes(made: ContainerSet, ssh_folder: str) -> list[str]:
    """Folders and files of the machine, those of the set relative to it."""
    by_path = [f"{BY_PATH}:{BY_PATH}:ro"] if made.gpus in ("intel", "amd") else []
    own = [f"./workload:{WORK}", f"./{ssh_folder}:{HOME}/.ssh:ro"]
    scripts = [f"./rank.sh:{RANK}:ro", f"./sshd.sh:{SSHD}:ro"]
    return [*own, *scripts, *by_path, *made.mounts]


def commands(made: ContainerSet) -> str:
    """What to type on each machine. A machine gets the keys of its own containers only."""
    build = shell_text(["docker", "build", "-t", made.image, "-f", "Containerfile", "."])
    machines: dict[str, list[Worker]] = {}
    for worker in made.workers:
        machines.setdefault(worker.address, []).append(worker)
    remote = {a: workers for a, workers in machines.items() if not _is_launcher(made, a)}
    lines = ["# On the launching machine, in this folder:", build]
    if remote:
        lines += ["", "# There, too: copy to each machine what its workers need, and no other keys"]
        lines += [_copy_line(made, address, workers) for address, workers in remote.items()]
    for address, workers in machines.items():
        aliases = ", ".join(worker.alias for worker in workers)
        place = f"in ~/{made.folder}" if address in remote else "in this folder"
        lines += ["", f"# On {address}, {place}: {aliases}"]
        lines += [build] if address in remote else []
        for worker in workers:
            name = f"paceline-{worker.alias}"
            lines.append(run_line(made, name, folder_of(worker), sshd_command()))
    launch = run_line(made, "paceline-launcher", "ssh_launcher", mpirun_command(made))
    lines += ["", "# On the launching machine, in this folder, once the workers are up:", launch]
    lines += ["", "# Instead of all that, if one machine runs all of it:", *_compose_lines(made)]
    return "\n".join(lines) + "\n"


def _is_launcher(made: ContainerSet, address: str) -> bool:
    return address in (made.launcher, "localhost", "127.0.0.1", "::1")


def _copy_line(made: ContainerSet, address: str, workers: list[Worker]) -> str:
    """Sends a machine's part of the set; ``tar`` keeps owners and modes, which sshd looks at."""
    parts = ["Containerfile", "rank.sh", "sshd.sh", "workload", *map(folder_of, workers)]
    folder = shell_text([made.folder])
    unpack = f"mkdir -p {folder} && tar -C {folder} -xpf -"
    return f"{shell_text(['tar', '-cf', '-', *parts])} | {shell_text(['ssh', address, unpack])}"


def _compose_lines(made: ContainerSet) -> list[str]:
    """Compose reads the machine's own group ids from ``.env``."""
    ids = f"getent group render video | awk -F: '{{ print toupper($1) \"{_GROUP_ID}=\" $3 }}' >.env"
    return [ids] * (made.gpus in ("intel", "amd")) + ["docker compose up --build"]


def compose(made: ContainerSet) -> dict[str, object]:
    """The same as a Compose file, for workers on this very machine."""
    services: dict[str, object] = {}
    for worker in made.workers:
        services[worker.alias] = _service(made, folder_of(worker), sshd_command())
    launcher = _service(made, "ssh_launcher", mpirun_command(made))
    launcher["depends_on"] = [worker.alias for worker in made.workers]
    services["launcher"] = launcher
    return {"name": "paceline", "services": services}


def _service(made: ContainerSet, ssh_folder: str, words: list[str]) -> dict[str, object]:
    def literal(text: str) -> str:  # where Compose would put variables in
        return text.replace("$", "$$")

    service: dict[str, object] = {
        "image": made.image,
        "build": {"context": ".", "dockerfile": "Containerfile"},
        "network_mode": "host",
        "user": str(made.uid),
        "init": True,
        "shm_size": made.shm_size,
        "working_dir": WORK,
        "volumes": [literal(volume) for volume in volumes(made, ssh_folder)],
        "environment": {name: literal(value) for name, value in environment(made).items()},
        "command": [literal(word) for word in words],
    }
    if devices := DEVICES.get(made.gpus):
        service["devices"] = list(devices)
    if made.gpus in ("intel", "amd"):
        service["group_add"] = [_VIDEO, _RENDER]
    if made.gpus == "nvidia":
        wanted = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [wanted]}}}
    return service


# --- onto this machine


def written(out: Path, made: ContainerSet) -> None:
    """Writes the set into a folder; keys that are there are kept.

    Raises:
        NodeError: ssh-keygen cannot make a key.
    """
    keys = make_keys(out, made.workers)
    for name, text in files(made, keys).items():
        _write(out / name, text)
    (out / "workload").mkdir(exist_ok=True)
    if os.getuid() == 0:
        _give_to(made.uid, out)


def _give_to(uid: int, out: Path) -> None:
    """What root has written belongs to the user in the containers, who has to read it."""
    for folder in [*out.glob("ssh_*"), out / "workload"]:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, -1)


def make_keys(out: Path, workers: tuple[Worker, ...]) -> Keys:
    """Makes what is not there yet; private halves never leave their folder."""
    identity = _key(out / "ssh_launcher" / KEY, "paceline launcher")
    hosts = {
        worker.alias: " ".join(_key(out / folder_of(worker) / HOST_KEY, worker.alias).split()[:2])
        for worker in workers
    }
    return Keys(identity, hosts)


def _key(path: Path, comment: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NodeError("ssh-keygen failed", found=done.stderr.strip())
    return path.with_suffix(".pub").read_text(encoding="utf-8").strip()


def _write(path: Path, text: str) -> None:
    """Readable by the owner only where ssh insists on it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if path.suffix == ".sh":
        path.chmod(0o755)
    if path.parent.name.startswith("ssh_"):
        path.chmod(0o600)
