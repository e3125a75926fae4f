"""Renders files for launcher and worker containers with sshd, in which mpirun starts the ranks.

Each path, alias, port and key is defined once in :class:`ContainerSet`, so that the files match.
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
from paceline.spec.errors import NodeError
from paceline.spec.formatting import shell_text

USER, UID = "dev", 1000
HOME = f"/home/{USER}"
WORK = "/workload"
FIRST_PORT = 12345
KEY = "id_ed25519"
HOST_KEY = "ssh_host_ed25519_key"
RANK = "/opt/paceline/rank"
SSHD = "/opt/paceline/sshd"
SSHD_COMMAND = [SSHD, "-f", f"{HOME}/.ssh/sshd_config"]
MPIS = ("intel", "mpich", "openmpi")
# maker of the GPUs → devices; AMD's and Intel's need groups as well
_DRI = ("/dev/dri",)
DEVICES = {"intel": _DRI, "amd": ("/dev/kfd", *_DRI), "nvidia": (), "cdi": ("nvidia.com/gpu=all",)}
BY_PATH = "/dev/dri/by-path"  # Level Zero needs it to identify cards; --device does not add it
# Group ids differ between machines, so the shell looks them up; some have no group ``render``
_GROUP_ID = "_GROUP_ID"
_VIDEO = "${VIDEO_GROUP_ID:?type the line for .env of commands.sh first}"
_RENDER = "${RENDER_GROUP_ID:-${VIDEO_GROUP_ID}}"
_GROUPS = """$(getent group render video | cut -d: -f3 | sed 's/^/--group-add=/')"""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker container: its name for ssh and mpirun, its machine, and the port of its sshd."""

    alias: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class ContainerSet:
    """A container for the launcher and one for each worker.

    Attributes:
        base: Image with Python, torch and MPI.
        image: Name of the image built from it.
        workers: Workers, in the order of their ranks.
        interface: Interface for MPI's traffic; empty for MPI's choice.
        launcher: Address of the launching machine if its container has ranks, too; then it has
            rank 0.
        processes: Ranks in a container.
        master_port: Rendezvous port on the machine of rank 0.
        activate: Scripts in the image that are sourced before mpirun and each rank.
        gpus: Maker of the GPUs, or ``cdi``; empty for none.
        uid: User id in the containers, which must own the keys on the machines.
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
    def rank_hosts(self) -> tuple[str, ...]:
        """Names of the containers with ranks for mpirun, rank 0 first."""
        launcher = ("localhost",) if self.launcher else ()
        return (*launcher, *(worker.alias for worker in self.workers))

    @property
    def master_address(self) -> str:
        return self.launcher or self.workers[0].address


@dataclass(frozen=True, slots=True)
class Keys:
    """The launcher's public key, one line, and type and key of each worker's host key, by alias."""

    identity: str
    hosts: Mapping[str, str]


def workers_of(addresses: Mapping[str, str], first_port: int = FIRST_PORT) -> tuple[Worker, ...]:
    """Returns the workers; each has its own port, so that two may share a machine."""
    return tuple(
        Worker(alias, address, first_port + number)
        for number, (alias, address) in enumerate(addresses.items())
    )


def files(spec: ContainerSet, keys: Keys) -> dict[str, str]:
    """Returns the content of all files but the keys, by path below the folder."""
    known_hosts = [f"{worker.alias} {keys.hosts[worker.alias]}\n" for worker in spec.workers]
    texts = {
        "Containerfile": containerfile(spec),
        "compose.yaml": json.dumps(compose(spec), indent=2) + "\n",
        "hostfile": "".join(f"{place}\n" for place in spec.rank_hosts),
        "rank.sh": rank_script(spec),
        "sshd.sh": SSHD_SCRIPT,
        "commands.sh": commands(spec),
        "ssh_launcher/config": ssh_config(spec),
        "ssh_launcher/known_hosts": "".join(known_hosts),
    }
    for worker in spec.workers:
        folder = folder_of(worker)
        texts[f"{folder}/sshd_config"] = sshd_config(worker)
        texts[f"{folder}/authorized_keys"] = f"restrict,pty {keys.identity}\n"
    return texts


def folder_of(worker: Worker) -> str:
    return f"ssh_worker-{worker.alias}"


def containerfile(spec: ContainerSet) -> str:
    """Returns the base with OpenSSH and an ordinary user; keys are mounted, never built in.

    An existing user of that name gets our uid and home. It is moved to the top of ``passwd``,
    because a look-up by uid (ssh for its config) takes the first entry.
    """
    uid = spec.uid
    return f"""FROM {spec.base}
USER root
RUN if [ -x /usr/sbin/sshd ]; then :; \\
    elif command -v apt-get >/dev/null; then \\
      apt-get update && apt-get install -y --no-install-recommends openssh-server openssh-client \\
      && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*; \\
    else dnf install -y openssh-server openssh-clients && rm -f /etc/ssh/ssh_host_*; fi; \\
    mkdir -p /run/sshd {WORK} && \\
    if id -u {USER} >/dev/null 2>&1; then \\
      usermod --non-unique --uid {uid} --home {HOME} {USER}; \\
    else useradd --non-unique --uid {uid} --create-home --home-dir {HOME} {USER}; fi && \\
    found="$(grep '^{USER}:' /etc/passwd; grep -v '^{USER}:' /etc/passwd)" && \\
    printf '%s\\n' "$found" >/etc/passwd && \\
    mkdir -p {HOME} && chown {uid} {HOME} && install -d -o {uid} -m 700 {HOME}/.ssh
USER {USER}
WORKDIR {WORK}
"""


def rank_script(spec: ContainerSet) -> str:
    """Returns a script around mpirun and each rank: activation, and torchrun's variables.

    Some MPIs pass the environment on, so the activation is skipped if it has already run.
    """
    sourced = [f". {shell_text([script])} || exit" for script in spec.activate]
    shared_lines = [
        "activate() {",  # a function, so that scripts do not see the command's arguments
        *sourced,
        "}",
        'if [ -z "$PACELINE_ACTIVATED" ]; then activate; export PACELINE_ACTIVATED=1; fi',
    ] * bool(sourced)
    shell = "/bin/bash" if sourced else "/bin/sh"
    return "\n".join(
        [f"#!{shell}", *shared_lines, *_callback_lines(spec), _RANK_VARIABLES, 'exec "$@"', ""]
    )


def _callback_lines(spec: ContainerSet) -> list[str]:
    """Returns lines that name the interface to which Hydra's workers connect back.

    By default they use this machine's name, which may not resolve there; ssh shows the address
    that a worker sees.
    """
    if spec.mpi == "openmpi" or spec.interface:
        return []
    address_text = f"$(ssh -n {spec.workers[0].alias} 'echo \"${{SSH_CONNECTION%% *}}\"')"
    return [
        'if [ "$1" = mpirun ]; then',
        f"own={shell_text([spec.launcher]) if spec.launcher else address_text} || exit",
        f'card=$(python3 -I -c {shell_text([_FIND_INTERFACE])} "$own")',
        'if [ -n "$card" ]; then shift; set -- mpirun -iface "$card" "$@"; fi',
        "fi",
    ]


# the interface that has an address
_FIND_INTERFACE = """import fcntl, socket, struct, sys
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _, name in socket.if_nameindex():
    try:
        said = fcntl.ioctl(asking, 0x8915, struct.pack("256s", name.encode()))
    except OSError:
        continue
    if socket.inet_ntoa(said[20:24]) == socket.gethostbyname(sys.argv[1]):
        print(name)
        break"""

_RANK_VARIABLES = """rank=${OMPI_COMM_WORLD_RANK:-${MV2_COMM_WORLD_RANK:-$PMI_RANK}}
if [ -n "$rank" ]; then
size=${OMPI_COMM_WORLD_SIZE:-${MV2_COMM_WORLD_SIZE:-$PMI_SIZE}}
local=${OMPI_COMM_WORLD_LOCAL_RANK:-${MV2_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-0}}}
here=${OMPI_COMM_WORLD_LOCAL_SIZE:-${MV2_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-1}}}
export RANK=$rank WORLD_SIZE=$size LOCAL_RANK=$local LOCAL_WORLD_SIZE=$here
export PMI_RANK=$rank PMI_SIZE=$size MPI_LOCALRANKID=$local MPI_LOCALNRANKS=$here
fi"""


# In the foreground, so that the container ends with sshd. Logins get the container's environment,
# in which the image sets the paths of its MPI, Python and libraries.
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
    """Returns the configuration of an sshd without root, with its own port; keys only."""
    ssh = f"{HOME}/.ssh"
    try:
        ipaddress.ip_address(worker.address)
        listen = f"ListenAddress {worker.address}\n"
    except ValueError:  # a name may mean loopback on its own machine
        listen = ""
    return f"""Port {worker.port}
{listen}HostKey {ssh}/{HOST_KEY}
AuthorizedKeysFile {ssh}/authorized_keys
PidFile none
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PermitRootLogin no
AllowTcpForwarding no
PrintMotd no
LogLevel INFO
"""


def ssh_config(spec: ContainerSet) -> str:
    lines = []
    for worker in spec.workers:
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


def mpirun_command(spec: ContainerSet) -> list[str]:
    """Returns the mpirun call, with equally many processes in each container."""
    per_container, total = (str(spec.processes), str(spec.processes * len(spec.rank_hosts)))
    if spec.mpi == "openmpi":  # passes on only what it is told to
        hosts = ",".join(f"{place}:{per_container}" for place in spec.rank_hosts)
        nets = ("oob_tcp_if_include", "btl_tcp_if_include") if spec.interface else ()
        mca = [word for name in nets for word in ("--mca", name, spec.interface)]
        passed = [word for name in environment(spec) for word in ("-x", name)]
        placement = ["--map-by", f"ppr:{per_container}:node", "--bind-to", "none"]
        head = ["mpirun", *mca, "--host", hosts, "-np", total, *placement, *passed]
        return [RANK, *head, RANK, *spec.command]
    interface = ["-iface", spec.interface] if spec.interface else []
    hosts = ",".join(spec.rank_hosts)
    head = ["mpirun", *interface, "-hosts", hosts, "-ppn", per_container, "-n", total]
    return [RANK, *head, RANK, *spec.command]


def environment(spec: ContainerSet) -> dict[str, str]:
    variables = {"MASTER_ADDR": spec.master_address, "MASTER_PORT": str(spec.master_port)}
    if spec.interface:
        names = (*EXACT, "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES")
        variables |= dict.fromkeys(names, spec.interface)
    return {**variables, **spec.env}


def run_line(spec: ContainerSet, name: str, ssh_folder: str, command: list[str]) -> str:
    """Returns ``docker run`` for one container, to be typed in the set's folder."""
    flags = ["docker", "run", "--rm", "--init", "--network=host", f"--name={name}"]
    flags += [f"--user={spec.uid}", f"--shm-size={spec.shm_size}", f"--workdir={WORK}"]
    flags += [f"--env={name}={value}" for name, value in environment(spec).items()]
    flags += [f"--device={device}" for device in DEVICES.get(spec.gpus, ())]
    flags += ["--gpus=all"] if spec.gpus == "nvidia" else []
    line = shell_text(flags)
    if spec.gpus in ("intel", "amd"):
        line += f" {_GROUPS}"
    for volume in volumes(spec, ssh_folder):
        # docker before version 23 refuses relative paths
        prefix = '"$PWD"' if volume.startswith("./") else ""
        line += f" --volume {prefix}{shell_text([volume[1:] if prefix else volume])}"
    return f"{line} {shell_text([spec.image, *command])}"


def volumes(spec: ContainerSet, ssh_folder: str) -> list[str]:
    """Returns the mounted folders and files; those of the set are relative to it."""
    by_path = [f"{BY_PATH}:{BY_PATH}:ro"] if spec.gpus in ("intel", "amd") else []
    folders = [f"./workload:{WORK}", f"./{ssh_folder}:{HOME}/.ssh:ro"]
    scripts = [f"./rank.sh:{RANK}:ro", f"./sshd.sh:{SSHD}:ro"]
    return [*folders, *scripts, *by_path, *spec.mounts]


def commands(spec: ContainerSet) -> str:
    """Returns the commands for each machine; a machine gets only its own containers' keys."""
    build = shell_text(["docker", "build", "-t", spec.image, "-f", "Containerfile", "."])
    machines: dict[str, list[Worker]] = {}
    for worker in spec.workers:
        machines.setdefault(worker.address, []).append(worker)
    own_addresses = (spec.launcher, "localhost", "127.0.0.1", "::1")
    remote = {a: workers for a, workers in machines.items() if a not in own_addresses}
    lines = ["# On the launching machine, in this folder:", build]
    if remote:
        lines += ["", "# There, too: copy to each machine what its workers need, and no other keys"]
        lines += [_copy_line(spec, address, workers) for address, workers in remote.items()]
    for address, workers in machines.items():
        aliases = ", ".join(worker.alias for worker in workers)
        place = f"in ~/{spec.folder}" if address in remote else "in this folder"
        lines += ["", f"# On {address}, {place}: {aliases}"]
        lines += [build] if address in remote else []
        for worker in workers:
            name = f"paceline-{worker.alias}"
            lines.append(run_line(spec, name, folder_of(worker), SSHD_COMMAND))
    launch = run_line(spec, "paceline-launcher", "ssh_launcher", mpirun_command(spec))
    lines += ["", "# On the launching machine, in this folder, once the workers are up:", launch]
    lines += ["", "# Instead of all that, if one machine runs all of it:"]
    if spec.gpus in ("intel", "amd"):  # Compose reads the machine's group ids from .env
        print_id = f'{{ print toupper($1) "{_GROUP_ID}=" $3 }}'
        lines.append(f"getent group render video | awk -F: '{print_id}' >.env")
    lines.append("docker compose up --build")
    return "\n".join(lines) + "\n"


def _copy_line(spec: ContainerSet, address: str, workers: list[Worker]) -> str:
    """Copies a machine's part of the set; ``tar`` keeps owners and modes, which sshd checks."""
    parts = ["Containerfile", "rank.sh", "sshd.sh", "workload", *map(folder_of, workers)]
    folder = shell_text([spec.folder])
    unpack = f"umask 022; mkdir -p {folder} && tar -C {folder} -xpf -"
    return f"{shell_text(['tar', '-cf', '-', *parts])} | {shell_text(['ssh', address, unpack])}"


def compose(spec: ContainerSet) -> dict[str, object]:
    services = {worker.alias: _service(spec, folder_of(worker), SSHD_COMMAND)
                for worker in spec.workers}  # fmt: skip
    launcher = _service(spec, "ssh_launcher", mpirun_command(spec))
    launcher["depends_on"] = [worker.alias for worker in spec.workers]
    services["launcher"] = launcher
    return {"name": "paceline", "services": services}


def _service(spec: ContainerSet, ssh_folder: str, command: list[str]) -> dict[str, object]:
    def literal(text: str) -> str:  # where Compose would put variables in
        return text.replace("$", "$$")

    service: dict[str, object] = {
        "image": spec.image,
        "build": {"context": ".", "dockerfile": "Containerfile"},
        "network_mode": "host",
        "user": str(spec.uid),
        "init": True,
        "shm_size": spec.shm_size,
        "working_dir": WORK,
        "volumes": [literal(volume) for volume in volumes(spec, ssh_folder)],
        "environment": {name: literal(value) for name, value in environment(spec).items()},
        "command": [literal(word) for word in command],
    }
    if devices := DEVICES.get(spec.gpus):
        service["devices"] = list(devices)
    if spec.gpus in ("intel", "amd"):
        service["group_add"] = [_VIDEO, _RENDER]
    if spec.gpus == "nvidia":
        gpu_request = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [gpu_request]}}}
    return service


def write_set(out: Path, spec: ContainerSet) -> None:
    """Writes the set into a folder; keys that are there are kept."""
    keys = make_keys(out, spec.workers)
    for name, text in files(spec, keys).items():
        _write(out / name, text)
    (out / "workload").mkdir(exist_ok=True)
    if os.getuid() == 0:
        _change_owner(spec.uid, out)


def _change_owner(uid: int, out: Path) -> None:
    """Gives root's files to the user in the containers, who reads them."""
    for folder in [*out.glob("ssh_*"), out / "workload"]:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, uid, -1)


def make_keys(out: Path, workers: tuple[Worker, ...]) -> Keys:
    """Makes missing keys; private keys never leave their folder."""
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
        result = subprocess.run(argv, capture_output=True, text=True, check=False)
        if result.returncode:
            raise NodeError("ssh-keygen failed", found=result.stderr.strip())
    return path.with_suffix(".pub").read_text(encoding="utf-8").strip()


def _write(path: Path, text: str) -> None:
    """Writes a file, readable only by the owner if ssh insists on it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if path.suffix == ".sh":
        path.chmod(0o755)
    if path.parent.name.startswith("ssh_"):
        path.chmod(0o600)
