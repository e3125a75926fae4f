"""Agents started by mpiexec: Intel MPI, MPICH and Open MPI, found and told apart by themselves.

MPI starts exactly one process a host, the agent; the ranks are the agent's, as everywhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.agent.caller import KEY
from paceline.remote.network import allow_from
from paceline.remote.openssh import FOR_PROGRAMS, SSH_FAILED, Refusal, SshOptions, classify
from paceline.remote.transport import Transport
from paceline.rendezvous.endpoint import usable_addresses
from paceline.rendezvous.started import Start, StartedTransport, said_by
from paceline.schedulers.commands import tail
from paceline.schedulers.scheduler import LOGIN, NOW, Options, Scheduler
from paceline.setup.login import effective_config
from paceline.spec.command import shell_text
from paceline.spec.errors import ConnectError, PacelineError, SettingError
from paceline.spec.hosts import Host
from paceline.spec.launched import MPI_DIALECTS, PROCESS_VARIABLES

NAMES = ("mpiexec", "mpirun", "mpiexec.hydra")  # the first on PATH that can be told counts
PLACES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
ROUTES_LOOKED_AT = 8  # hosts: the others are reached by the same route
PROBES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI that was found.

    Attributes:
        flavour: ``intel``, ``mpich`` or ``openmpi``.
        version: As it says itself.
        path: Its mpiexec.
    """

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
    """Flavour and version from what ``mpiexec --version`` says; ``None`` for something else."""
    for flavour, pattern in _VERSIONS:
        if match := re.search(pattern, text, re.DOTALL):
            return flavour, match.group(1)
    return None


def find(chosen: str | None, path: str | None = None) -> Mpi:
    """The MPI to use.

    Args:
        chosen: What the user named; ``None`` looks on ``PATH``.
        path: Instead of ``PATH``.

    Raises:
        SettingError: There is none, or two different ones are mixed.
    """
    if chosen is not None:
        named = _ask(shutil.which(chosen, path=path) or chosen)
        if named is None:
            raise SettingError(
                f"--mpiexec {chosen} is no mpiexec that we know",
                found="it does not say that it belongs to Intel MPI, MPICH or Open MPI",
                remedy=f"Try: {chosen} --version",
            )
        return named
    found = [m for name in NAMES if (where := shutil.which(name, path=path)) and (m := _ask(where))]
    if not found:
        raise _none_found()
    # mpiexec.hydra may well stand beside another MPI's mpiexec; mpiexec and mpirun belong together
    pair = [m for m in found if Path(m.path).name in ("mpiexec", "mpirun")]
    if len({m.flavour for m in pair}) > 1:
        raise _mixed(pair)
    return found[0]


def _ask(path: str) -> Mpi | None:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    parsed = parse_version(done.stdout + done.stderr)
    return Mpi(*parsed, path) if parsed else None


def _none_found() -> SettingError:
    return SettingError(
        "--via mpi needs an MPI, and there is none",
        found=f"none of {', '.join(NAMES)} on PATH",
        remedy="Load its module, or source its vars.sh, or name it: --mpiexec PATH; or install "
        "one: python -m pip install impi-rt, or sudo apt-get install mpich",
    )


def _mixed(pair: Sequence[Mpi]) -> SettingError:
    return SettingError(
        "two MPIs are mixed on PATH",
        found="\n".join(f"{m.path}: {m.title}" for m in pair),
        remedy=f"Name the one you mean: --mpiexec {pair[0].path}",
    )


# --- rendering: pure ----------------------------------------------------------------------------


def command(mpi: Mpi, hosts: Sequence[Host], options: Options, ssh_config: str,
            callback: str | None = None) -> list[str]:  # fmt: skip
    """The mpiexec call that starts one process on each host; the command follows it.

    Args:
        mpi: Which MPI.
        hosts: Where.
        options: What the user said.
        ssh_config: Path of the ssh config for MPI's own logins.
        callback: Interface of this machine that the hosts reach; ``None`` when unknown.
    """
    render = _RENDERERS[mpi.flavour]
    return [mpi.path, *render(hosts, options, ssh_config, callback), *options.arguments]


_Renderer = Callable[[Sequence[Host], Options, str, "str | None"], list[str]]


def _hydra(launcher: str) -> _Renderer:
    """Hydra's proxies call back by this machine's name, unless it is given an interface."""

    def render(hosts: Sequence[Host], options: Options, ssh_config: str,
               callback: str | None) -> list[str]:  # fmt: skip
        names = ",".join(host.address for host in hosts)
        own = {"-iface", "-localhost"} & set(options.arguments)
        interface = options.interface or (None if own else callback)
        iface = ["-iface", interface] if interface else []
        return [launcher, "ssh", *iface, "-hosts", names, "-ppn", "1", "-n", str(len(hosts))]

    return render


def _openmpi(hosts: Sequence[Host], options: Options, ssh_config: str,
             callback: str | None) -> list[str]:  # fmt: skip
    """Open MPI's daemons call back by address: they are told all that this machine has."""
    names = ",".join(f"{host.address}:1" for host in hosts)
    # an agent that ends takes no other with it: what follows from that is for the launcher to say
    mca = {"plm_rsh_agent": "ssh", "plm_rsh_args": f"-F {ssh_config}",
           "orte_enable_recovery": "1", "orte_abort_on_non_zero_status": "0"}  # fmt: skip
    if options.interface:
        mca |= {"oob_tcp_if_include": options.interface, "btl_tcp_if_include": options.interface}
    settings = [word for name, value in mca.items() for word in ("--mca", name, value)]
    placing = ["--map-by", "ppr:1:node", "--bind-to", "none"]
    return [*settings, "--host", names, "-np", str(len(hosts)), *placing, "-x", KEY]


_RENDERERS: dict[str, _Renderer] = {
    "intel": _hydra("-bootstrap"),
    "mpich": _hydra("-launcher"),
    "openmpi": _openmpi,
}


def environment(mpi: Mpi, ssh_config: str, root: bool) -> dict[str, str | None]:
    """Variables for mpiexec itself."""
    arguments = f"-F {ssh_config}"
    if mpi.flavour == "openmpi":
        allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return {**allow} if root else {}
    return {
        "HYDRA_LAUNCHER_EXTRA_ARGS": arguments,
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": arguments,
        "I_MPI_HYDRA_HOST_FILE": None,
        "HYDRA_HOST_FILE": None,
    }


def ssh_config(hosts: Sequence[Host], ssh: SshOptions) -> str:
    """An ssh config for MPI's own logins: the hosts' settings, no prompts, then the user's file."""
    lines = []
    for host in hosts:
        own = {"User": host.user, "Port": host.port, "IdentityFile": host.identity_file}
        given = [f"    {name} {value}" for name, value in own.items() if value]
        lines += [f"Host {host.address}", *given] if given else []
    checking = "accept-new" if ssh.accept_new_host_keys else "yes"
    common = [
        "Host *",
        "    BatchMode yes",
        f"    StrictHostKeyChecking {checking}",
        "    ConnectTimeout 5",
        *(f"    {name} {value}" for name, value in FOR_PROGRAMS.items()),
    ]
    config = ssh.config.absolute() if ssh.config else "~/.ssh/config"
    return "\n".join([*lines, *common, f"    Include {_quoted(str(config))}"]) + "\n"


def _quoted(path: str) -> str:
    return f'"{path}"' if " " in path else path


# --- which network: this machine's routes


async def interface_towards(hosts: Sequence[Host], ssh: SshOptions) -> str | None:
    """The interface of this machine from which the hosts are reached.

    For programs that otherwise tell the hosts to call back by this machine's name, which perhaps
    nobody can resolve. ``None`` when no route can be found.
    """
    others = [host for host in hosts if not host.local][:ROUTES_LOOKED_AT]
    if not others:
        return "lo" if Path("/sys/class/net/lo").is_dir() else None
    names = await asyncio.gather(*(effective_config(host, ssh) for host in others))
    targets = [name.get("hostname", [host.address])[0] for name, host in zip(names, others,
               strict=True)]  # fmt: skip
    sources = await asyncio.gather(*(asyncio.to_thread(source_towards, one) for one in targets))
    by_address = {str(entry["address"]): str(entry["interface"]) for entry in usable_addresses()}
    used = Counter(by_address[source] for source in sources if source in by_address)
    return used.most_common(1)[0][0] if used else None


def source_towards(target: str) -> str | None:
    """The address of this machine from which the kernel would send to another. Sends nothing."""
    try:
        kind, _, _, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return None


# --- what went wrong: pure ------------------------------------------------------------------------

# ssh's own words among mpiexec's: some mpiexec wait for ever for a host that ssh cannot reach
_HOPELESS = re.compile(
    r"ssh: connect to host|ssh: Could not resolve|Permission denied \(|"
    r"Host key verification failed|ORTE was unable|Unable to run bstrap_proxy|"
    r"proxy: (not found|No such file)|unable to get host address for|getaddrinfo returned error"
)


def lacks_mpi(mpi: Mpi, host: Host) -> Refusal:
    """A host that can be logged in to but has no MPI at that path."""
    return Refusal(
        "MPI is not installed there, or at another place",
        f"there is no {mpi.path} on {host.name}",
        f"Install {mpi.title} there, or take one that every host has: --mpiexec PATH",
    )


# what MPI itself says -> cause, and what to type; the words of the log decide
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


def cause_of(words: str, hosts: Sequence[Host]) -> tuple[str, str] | None:
    """Cause and remedy from the words of MPI; ``None`` when they say nothing known."""
    for pattern, cause, remedy in _CAUSES:
        if match := re.search(pattern, words, re.DOTALL):
            name = next((one for one in match.groupdict().values() if one), "the launching machine")
            names = ", ".join(host.name for host in hosts)
            return cause, remedy.format(name=name, hosts=names, commands=_let_in(hosts))
    return None


def _let_in(hosts: Sequence[Host]) -> str:
    """The commands that open this machine's firewall; only iptables takes a host's name."""
    wanted = [host.job_address or host.address for host in hosts]
    try:
        for one in wanted:
            ipaddress.ip_address(one)
    except ValueError:
        return f"sudo iptables -I INPUT -s {','.join(wanted)} -j ACCEPT"
    return allow_from(wanted)


def failed_alone(host: Host, words: str) -> Refusal:
    """A host on which MPI fails though ssh and MPI's own files are there."""
    cause, remedy = cause_of(words, [host]) or (
        "MPI did not start a program there",
        "Read MPI's words above; --via ssh does without it",
    )
    return Refusal(cause, tail(words), remedy)


# --- the scheduler --------------------------------------------------------------------------------


class MpiStarter:
    """An mpiexec for all hosts, and one for each that is lost.

    Their ssh config lives in a folder of its own until the end.
    """

    apart = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self._mpi = find(options.mpiexec)
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-mpi-")
        self._config = str(Path(self._folder.name) / "ssh_config")
        self._logins: dict[str, Host] = {}  # all that it is for

    async def start(self, hosts: Sequence[Host]) -> Start:
        """The mpiexec call."""
        self._write_config(hosts)
        argv = await self._command(hosts)
        return Start(tuple(argv), self._environment(), PLACES, PROCESS_VARIABLES)

    async def _command(self, hosts: Sequence[Host]) -> list[str]:
        callback = await interface_towards(hosts, self._options.ssh)
        return command(self._mpi, hosts, self._options, self._config, callback)

    def _write_config(self, hosts: Sequence[Host]) -> None:
        """For these as well; whole at any time, for an ssh of another mpiexec may read it."""
        self._logins |= {host.name: host for host in hosts}
        new = Path(f"{self._config}.new")
        text = ssh_config(list(self._logins.values()), self._options.ssh)
        new.write_text(text, encoding="utf-8")
        new.replace(self._config)

    def _environment(self) -> Mapping[str, str | None]:
        return environment(self._mpi, self._config, root=os.geteuid() == 0)

    def hopeless(self, words: str) -> bool:
        """Some host cannot be reached, so mpiexec will not do it."""
        return bool(_HOPELESS.search(words))

    def end(self) -> None:
        """Removes the ssh config."""
        self._folder.cleanup()

    async def explain(self, hosts: Sequence[Host], missing: Sequence[Host], status: int | None,
                      words: str) -> PacelineError:  # fmt: skip
        """mpiexec gives up as a whole; asking for every host alone tells which ones are dead."""
        gate = asyncio.Semaphore(PROBES_AT_ONCE)

        async def look(host: Host) -> Refusal | None:
            async with gate:
                return await self._look_at(host)

        answers = await asyncio.gather(*(look(host) for host in missing))
        dead = {h.name: a for h, a in zip(missing, answers, strict=True) if a is not None}
        if not dead:
            return no_call(self._mpi, missing, status, words)
        return dead_hosts(self._mpi, hosts, dead)

    async def _look_at(self, host: Host) -> Refusal | None:
        """Why MPI can start nothing on a host; ``None`` when it can."""
        if not host.local:
            look = [
                "ssh",
                "-F",
                self._config,
                "--",
                host.address,
                shell_text(["ls", self._mpi.path]),
            ]
            status, words = await said_by(look, {})
            if status == SSH_FAILED or status is None:
                return classify(words, status, host)
            if status:
                return lacks_mpi(self._mpi, host)
        head = await self._command([host])
        status, words = await said_by([*head, "hostname"], {KEY: "", **self._environment()})
        return failed_alone(host, words) if status != 0 else None


def dead_hosts(mpi: Mpi, hosts: Sequence[Host], dead: Mapping[str, Refusal]) -> ConnectError:
    """The error for hosts on which MPI cannot start anything; the others are named too."""
    alive = [host.name for host in hosts if host.name not in dead]
    found = [f"{name}: {refusal.cause}: {refusal.found}" for name, refusal in dead.items()]
    noun = "host" if len(hosts) == 1 else "hosts"
    return ConnectError(
        f"{mpi.title} cannot start anything on {len(dead)} of {len(hosts)} {noun}: "
        + ", ".join(dead),
        found="\n".join([*found, f"answered: {', '.join(alive) or 'nobody'}"]),
        remedy="\n".join(f"{name}: {refusal.remedy}" for name, refusal in dead.items()),
        brief=", ".join(dict.fromkeys(refusal.cause for refusal in dead.values())),
    )


def no_call(mpi: Mpi, missing: Sequence[Host], status: int | None, words: str) -> ConnectError:
    """The error for hosts that MPI reaches one by one and that did not reach us."""
    names = ", ".join(host.name for host in missing)
    if status:
        cause, remedy = cause_of(words, missing) or ("", "Try again, or do without MPI: --via ssh")
        return ConnectError(
            f"{mpi.title} failed on all hosts together, and works on each of them alone"
            + (f": {cause}" if cause else ""),
            found=f"mpiexec ended with status {status}\n{tail(words)}".strip(),
            remedy=remedy,
            brief=cause or f"mpiexec ended with status {status}: {tail(words, 1) or 'no word'}",
        )
    return ConnectError(
        f"{mpi.title} runs programs on all hosts, but no agent called from {names}",
        found=tail(words) or "no word from mpiexec",
        remedy=f"Let {names} connect to this machine (firewall?), or --iface for another network",
    )


class MpiExec(Scheduler):
    """For hosts that have an MPI; its own logins are over SSH."""

    name, title = "mpi", "MPI"
    starting = NOW | LOGIN | {"via_arg", "mpiexec", "wait_for_nodes"}
    calls_back = True

    def start(self, options: Options) -> Transport:
        return StartedTransport(MpiStarter(options), options.interface, dialects=MPI_DIALECTS)


SCHEDULER = MpiExec()
