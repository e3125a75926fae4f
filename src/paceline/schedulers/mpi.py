"""Starts agents by the mpiexec of Intel MPI, MPICH or Open MPI, which is detected.

MPI starts one process on each host, the agent; the agent starts the ranks, as everywhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.agent.caller import KEY_VARIABLE
from paceline.remote.login import effective_config
from paceline.remote.network import allow_from
from paceline.remote.openssh import BATCH_SETTINGS, SSH_FAILED, Refusal, SshOptions, classify
from paceline.remote.transport import Transport
from paceline.rendezvous.endpoint import usable_addresses
from paceline.rendezvous.scheduled import ScheduledTransport, Start, run_command
from paceline.schedulers import mpi_ssh
from paceline.schedulers.commands import last_lines
from paceline.schedulers.scheduler import SSH_OPTIONS, START_OPTIONS, Options, Scheduler
from paceline.spec.errors import ConnectError, PacelineError, SettingError
from paceline.spec.formatting import pluralize, shell_text
from paceline.spec.hosts import Host
from paceline.spec.launchers import MPI_DIALECTS, PROCESS_VARIABLES

MPIEXEC_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra")  # the first on PATH that can be told counts
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
MAX_ROUTES = 8  # hosts: the others are reached by the same route
MAX_CONCURRENT_PROBES = 8
MAX_HOSTS = 4096  # that one process of Intel MPI may log in to
SSH, CONFIG, KEY = "ssh", "ssh_config", "key"  # files for MPI's own logins
# flags of the user with which MPI may start its processes without our ssh
LOGIN_FLAGS = {"-bootstrap-exec", "-launcher-exec", "plm", "plm_rsh_agent"}


@dataclass(frozen=True, slots=True)
class Mpi:
    """An installed MPI: ``intel``, ``mpich`` or ``openmpi``, and the path of its mpiexec."""

    flavour: str
    version: str
    path: str

    @property
    def title(self) -> str:
        return f"{_TITLES[self.flavour]} {self.version}"


_TITLES = {"intel": "Intel MPI", "mpich": "MPICH", "openmpi": "Open MPI"}
_VERSIONS = (
    ("intel", r"Intel\(R\) MPI Library.*?Version ([\d.]+)"),
    ("openmpi", r"\((?:OpenRTE|Open MPI|PRRTE)\) ([\w.]+)"),
    ("mpich", r"HYDRA build details:\s+Version:\s+(\S+)"),
)


def parse_version(text: str) -> tuple[str, str] | None:
    """Parses flavour and version from ``mpiexec --version``; ``None`` for other programs."""
    for flavour, pattern in _VERSIONS:
        if match := re.search(pattern, text, re.DOTALL):
            return flavour, match.group(1)
    return None


def find_mpi(requested: str | None) -> Mpi:
    """Returns the MPI of the user's mpiexec; ``None`` searches ``PATH``.

    Raises SettingError if there is none, or two different ones are mixed.
    """
    if requested is not None:
        mpi = _read_version(shutil.which(requested) or requested)
        if mpi is None:
            raise SettingError(
                f"--mpiexec {requested} is not an mpiexec that Paceline knows",
                found="it does not say that it belongs to Intel MPI, MPICH or Open MPI",
                remedy=f"Try: {requested} --version",
            )
        return mpi
    paths = filter(None, map(shutil.which, MPIEXEC_NAMES))
    installed = [mpi for path in paths if (mpi := _read_version(path))]
    if not installed:
        raise SettingError(
            "--via mpi needs an MPI, and there is none",
            found=f"none of {', '.join(MPIEXEC_NAMES)} on PATH",
            remedy="Load its module, or source its vars.sh, or name it: --mpiexec PATH; or install "
            "one: python -m pip install impi-rt, or sudo apt-get install mpich",
        )
    # mpiexec.hydra may well stand beside another MPI's mpiexec; mpiexec and mpirun belong together
    pair = [m for m in installed if Path(m.path).name in ("mpiexec", "mpirun")]
    if len({m.flavour for m in pair}) > 1:
        raise SettingError(
            "two MPIs are mixed on PATH",
            found="\n".join(f"{mpi.path}: {mpi.title}" for mpi in pair),
            remedy=f"Name the one you mean: --mpiexec {pair[0].path}",
        )
    return installed[0]


def _read_version(path: str) -> Mpi | None:
    try:
        result = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    parsed = parse_version(result.stdout + result.stderr)
    return Mpi(*parsed, path) if parsed else None


# --- rendering: pure ----------------------------------------------------------------------------


def command(mpi: Mpi, hosts: Sequence[Host], options: Options, ssh_folder: str,
            callback_interface: str | None = None) -> list[str]:  # fmt: skip
    """Returns the mpiexec call that starts one process on each host; append its command.

    Args:
        mpi, hosts, options: The MPI, the hosts, and the user's options.
        ssh_folder: Folder of MPI's ssh and its config.
        callback_interface: Interface of this machine that the hosts reach; ``None`` if unknown.
    """
    render = _RENDERERS[mpi.flavour]
    return [mpi.path, *render(hosts, options, ssh_folder, callback_interface), *options.arguments]


_Renderer = Callable[[Sequence[Host], Options, str, "str | None"], list[str]]


def uses_our_ssh(options: Options) -> bool:
    """Whether MPI's logins carry the key of the run. If not, ``mpiexec`` passes it on."""
    return not LOGIN_FLAGS & set(options.arguments)


def _hydra(launcher: str) -> _Renderer:
    """Returns the renderer for Hydra; without an interface, its proxies call this host's name."""

    def render(hosts: Sequence[Host], options: Options, ssh_folder: str,
               callback_interface: str | None) -> list[str]:  # fmt: skip
        names = ",".join(host.address for host in hosts)
        user_interface = {"-iface", "-localhost"} & set(options.arguments)
        interface = options.interface or (None if user_interface else callback_interface)
        iface = ["-iface", interface] if interface else []
        return [launcher, "ssh", *iface, "-hosts", names, "-ppn", "1", "-n", str(len(hosts))]

    return render


def _openmpi(hosts: Sequence[Host], options: Options, ssh_folder: str,
             callback_interface: str | None) -> list[str]:  # fmt: skip
    """Renders Open MPI's options; its daemons call back by all addresses of this machine."""
    names = ",".join(f"{host.address}:1" for host in hosts)
    # the end of one agent must not end the others; the launcher decides
    # daemons look for the agent, too; with a tree, they would call each other
    mca = {"plm_rsh_agent": f"{ssh_folder}/{SSH} : ssh", "plm_rsh_no_tree_spawn": "1",
           "plm_rsh_args": f"-F {ssh_folder}/{CONFIG}",
           "orte_enable_recovery": "1", "orte_abort_on_non_zero_status": "0",
           # the mapper below compares whole names
           "orte_keep_fqdn_hostnames": "1"}  # fmt: skip
    if options.interface:
        mca |= {"oob_tcp_if_include": options.interface, "btl_tcp_if_include": options.interface}
    settings = [word for name, value in mca.items() for word in ("--mca", name, value)]
    # one process for each name, in their order; other mappers begin with this machine
    placing = ["--map-by", "seq", "--bind-to", "none"]
    key = [] if uses_our_ssh(options) else ["-x", KEY_VARIABLE]
    return [*settings, "--host", names, "-np", str(len(hosts)), *placing, *key]


_RENDERERS: dict[str, _Renderer] = {
    "intel": _hydra("-bootstrap"),
    "mpich": _hydra("-launcher"),
    "openmpi": _openmpi,
}


def mpiexec_variables(mpi: Mpi, ssh_folder: str, is_root: bool) -> dict[str, str | None]:
    """Returns the variables to set for mpiexec itself; ``None`` removes one."""
    if mpi.flavour == "openmpi":
        names = ["PRTE_MCA_prte_keep_fqdn_hostnames"]  # as of orte above, in Open MPI 5
        names += ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] if is_root else []
        return dict.fromkeys(names, "1")
    ssh, arguments = f"{ssh_folder}/{SSH}", f"-F {ssh_folder}/{CONFIG}"
    return {
        "HYDRA_LAUNCHER_EXEC": ssh,
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": ssh,
        "HYDRA_LAUNCHER_EXTRA_ARGS": arguments,
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": arguments,
        # no tree of logins: the hosts do not have our ssh
        "I_MPI_HYDRA_BRANCH_COUNT": str(MAX_HOSTS),
        "I_MPI_HYDRA_HOST_FILE": None,
        "HYDRA_HOST_FILE": None,
    }


def ssh_config(hosts: Sequence[Host], ssh: SshOptions) -> str:
    """Returns an ssh config for MPI's own logins: the hosts' settings, then the user's file."""
    lines = []
    for host in hosts:
        settings = {"User": host.user, "Port": host.port, "IdentityFile": host.identity_file}
        options = [f"    {name} {value}" for name, value in settings.items() if value]
        lines += [f"Host {host.address}", *options] if options else []
    checking = "accept-new" if ssh.accept_new_host_keys else "yes"
    common = [
        "Host *",
        "    BatchMode yes",
        f"    StrictHostKeyChecking {checking}",
        "    ConnectTimeout 5",
        *(f"    {name} {value}" for name, value in BATCH_SETTINGS.items()),
    ]
    config = str(ssh.config.absolute()) if ssh.config else "~/.ssh/config"
    quote = '"' if " " in config else ""
    return "\n".join([*lines, *common, f"    Include {quote}{config}{quote}"]) + "\n"


# --- which network: this machine's routes


async def interface_towards(hosts: Sequence[Host], ssh: SshOptions) -> str | None:
    """Returns the interface of this machine that routes to the hosts; ``None`` without a route.

    MPI would otherwise use this machine's name, which the hosts may not resolve.
    """
    remote_hosts = [host for host in hosts if not host.local][:MAX_ROUTES]
    if not remote_hosts:
        return "lo" if Path("/sys/class/net/lo").is_dir() else None

    async def source(host: Host) -> str | None:
        config = await effective_config(host, ssh)
        return await asyncio.to_thread(source_towards, config.get("hostname", [host.address])[0])

    sources = await asyncio.gather(*map(source, remote_hosts))
    by_address = {str(entry["address"]): str(entry["interface"]) for entry in usable_addresses()}
    interfaces = Counter(by_address[source] for source in sources if source in by_address)
    return interfaces.most_common(1)[0][0] if interfaces else None


def source_towards(target: str) -> str | None:
    """Returns the source address that the kernel would use for a target. Sends nothing."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


# --- what went wrong: pure ------------------------------------------------------------------------

# ssh's messages in mpiexec's output: some mpiexec wait for ever for a host that ssh cannot reach
_HOPELESS = re.compile(
    r"ssh: connect to host|ssh: Could not resolve|Permission denied \(|"
    r"Host key verification failed|ORTE was unable|Unable to run bstrap_proxy|"
    r"proxy: (not found|No such file)|unable to get host address for|getaddrinfo returned error"
)


# pattern in MPI's output → cause and remedy
_UNRESOLVED = (
    r"unable to get host address for (?P<name>\S+)|getaddrinfo returned error.*?"
    r"(?:unable to connect to server (?P<server>\S+)|$)|name resolution|Name or service not known"
)
_CAUSES = (
    (
        _UNRESOLVED,
        "it cannot resolve a host's name: name resolution failed",
        "Give every host an entry for {name} in its /etc/hosts, or name the interface by whose "
        "address MPI shall call back: --iface NAME",
    ),
    (
        r"unable to connect to server|unable to connect from|Connection refused|No route to host|"
        r"Connection timed out|check for firewalls",
        "its MPI could not connect back to the launching machine",
        "Let {hosts} connect to this machine on all TCP ports, or --iface for another network\n"
        "Here: {commands}",
    ),
)


def find_cause(output: str, hosts: Sequence[Host]) -> tuple[str, str] | None:
    """Returns cause and remedy from MPI's output; ``None`` if no pattern matches."""
    for pattern, cause, remedy in _CAUSES:
        if match := re.search(pattern, output, re.DOTALL):
            name = next(filter(None, match.groupdict().values()), "the launching machine")
            names = ", ".join(host.name for host in hosts)
            return cause, remedy.format(name=name, hosts=names, commands=_firewall_commands(hosts))
    return None


def _firewall_commands(hosts: Sequence[Host]) -> str:
    """Returns commands that open this machine's firewall; only iptables accepts host names."""
    addresses = [host.job_address or host.address for host in hosts]
    try:
        for address in addresses:
            ipaddress.ip_address(address)
    except ValueError:
        return f"sudo iptables -I INPUT -s {','.join(addresses)} -j ACCEPT"
    return allow_from(addresses)


def launch_refusal(host: Host, output: str) -> Refusal:
    """Returns the refusal of a host on which MPI fails although ssh works and MPI is installed."""
    cause, remedy = find_cause(output, [host]) or (
        "MPI did not start a program there",
        "Read MPI's words above; --via ssh does without it",
    )
    return Refusal(cause, last_lines(output), remedy)


# --- the scheduler --------------------------------------------------------------------------------


class MpiStarter:
    """Starts one mpiexec for all hosts, and another for each host that is lost.

    Their ssh, its config and the key of the run are in a temporary folder until the end.
    """

    starts_each_host = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self._mpi = find_mpi(options.mpiexec)
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-mpi-")
        folder = Path(self._folder.name)
        self._config, self._key_file = str(folder / CONFIG), str(folder / KEY)
        ssh = [sys.executable, "-I", mpi_ssh.__file__, self._key_file, KEY_VARIABLE]
        (folder / SSH).write_text(f'#!/bin/sh\nexec {shell_text(ssh)} "$@"\n', encoding="utf-8")
        (folder / SSH).chmod(0o700)
        if not os.access(folder / SSH, os.X_OK):
            raise SettingError(
                "--via mpi needs a program of its own, and temporary files cannot be run",
                found=f"{tempfile.gettempdir()} is mounted with noexec",
                remedy="Set TMPDIR to a folder on another disk: export TMPDIR=FOLDER",
            )
        self._logins: dict[str, Host] = {}  # all that it is for

    async def start(self, hosts: Sequence[Host]) -> Start:
        """Returns the mpiexec call."""
        self._write_config(hosts)
        argv = await self._command(hosts)
        key_file = self._key_file if uses_our_ssh(self._options) else ""
        variables = RANK_VARIABLES, PROCESS_VARIABLES
        return Start(tuple(argv), self._environment(), *variables, key_file=key_file)

    async def _command(self, hosts: Sequence[Host]) -> list[str]:
        callback_interface = await interface_towards(hosts, self._options.ssh)
        return command(self._mpi, hosts, self._options, self._folder.name, callback_interface)

    def _write_config(self, hosts: Sequence[Host]) -> None:
        """Adds hosts to the ssh config; replaces it atomically, because ssh may be reading it."""
        self._logins |= {host.name: host for host in hosts}
        temporary = Path(f"{self._config}.new")
        text = ssh_config(list(self._logins.values()), self._options.ssh)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self._config)

    def _environment(self) -> Mapping[str, str | None]:
        return mpiexec_variables(self._mpi, self._folder.name, is_root=os.geteuid() == 0)

    def hopeless(self, output: str) -> bool:
        """Whether a host cannot be reached, so that mpiexec cannot succeed."""
        return bool(_HOPELESS.search(output))

    def end(self) -> None:
        """Removes the folder."""
        self._folder.cleanup()

    async def explain(self, hosts: Sequence[Host], missing: Sequence[Host], status: int | None,
                      output: str) -> PacelineError:  # fmt: skip
        """Returns the error after trying every host alone, because mpiexec fails as a whole."""
        gate = asyncio.Semaphore(MAX_CONCURRENT_PROBES)

        async def diagnose(host: Host) -> Refusal | None:
            async with gate:
                return await self._diagnose(host)

        answers = await asyncio.gather(*(diagnose(host) for host in missing))
        dead = {h.name: a for h, a in zip(missing, answers, strict=True) if a is not None}
        if not dead:
            return no_callback_error(self._mpi, missing, status, output)
        return unreachable_error(self._mpi, hosts, dead)

    async def _diagnose(self, host: Host) -> Refusal | None:
        """Returns why MPI cannot start anything on a host; ``None`` if it can."""
        if not host.local:
            remote = shell_text(["ls", self._mpi.path])
            ssh = ["ssh", "-F", self._config, "--", host.address, remote]
            status, output = await run_command(ssh, {})
            if status == SSH_FAILED or status is None:
                return classify(output, status, host)
            if status:
                return Refusal(
                    "MPI is not installed there, or at another place",
                    f"there is no {self._mpi.path} on {host.name}",
                    f"Install {self._mpi.title} there, or take one that every host has: "
                    "--mpiexec PATH",
                )
        argv = [*await self._command([host]), "hostname"]
        status, output = await run_command(argv, self._environment())
        return launch_refusal(host, output) if status != 0 else None


def unreachable_error(
    mpi: Mpi, hosts: Sequence[Host], refusals: Mapping[str, Refusal]
) -> ConnectError:
    """Returns the error for hosts on which MPI cannot start anything; also names the others."""
    alive = [host.name for host in hosts if host.name not in refusals]
    details = [f"{name}: {refusal.cause}: {refusal.details}" for name, refusal in refusals.items()]
    return ConnectError(
        f"{mpi.title} cannot start anything on {len(refusals)} of {pluralize(len(hosts), 'host')}: "
        + ", ".join(refusals),
        found="\n".join([*details, f"answered: {', '.join(alive) or 'nobody'}"]),
        remedy="\n".join(f"{name}: {refusal.remedy}" for name, refusal in refusals.items()),
        brief=", ".join(dict.fromkeys(refusal.cause for refusal in refusals.values())),
    )


def no_callback_error(
    mpi: Mpi, missing: Sequence[Host], status: int | None, output: str
) -> ConnectError:
    """Returns the error for hosts that MPI reaches alone but that did not connect to us."""
    names = ", ".join(host.name for host in missing)
    if status:
        default = ("", "Try again, or do without MPI: --via ssh")
        cause, remedy = find_cause(output, missing) or default
        ending = f"mpiexec ended with status {status}"
        return ConnectError(
            f"{mpi.title} failed on all hosts together, and works on each of them alone"
            + (f": {cause}" if cause else ""),
            found=f"{ending}\n{last_lines(output)}".strip(),
            remedy=remedy,
            brief=cause or f"{ending}: {last_lines(output, 1) or 'no word'}",
        )
    return ConnectError(
        f"{mpi.title} runs programs on all hosts, but no agent called from {names}",
        found=last_lines(output) or "no word from mpiexec",
        remedy=f"Let {names} connect to this machine (firewall?), or --iface for another network",
    )


class MpiExec(Scheduler):
    """For hosts that have an MPI; its own logins are over SSH."""

    name, title = "mpi", "MPI"
    start_options = START_OPTIONS | SSH_OPTIONS | {"via_arg", "mpiexec", "wait_for_nodes"}
    needs_callback = True

    def start(self, options: Options) -> Transport:
        return ScheduledTransport(MpiStarter(options), options.interface, dialects=MPI_DIALECTS)


SCHEDULER = MpiExec()
