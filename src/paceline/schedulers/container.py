"""Runs agents in containers, started over SSH (on this machine without it).

The agent and its ranks run in the container. Each engine is a scheduler of its own.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.remote.channel import Channel
from paceline.remote.fanout import connect_hosts
from paceline.remote.login import Wrap
from paceline.remote.openssh import SSH_FAILED, classify, ssh_command
from paceline.remote.transport import ConnectedCallback, Transport, ignore_count
from paceline.rendezvous.scheduled import run_command
from paceline.schedulers import load
from paceline.schedulers.scheduler import (
    DETACH_OPTIONS,
    SSH_OPTIONS,
    START_OPTIONS,
    ContainerOptions,
    Options,
    Scheduler,
)
from paceline.schedulers.ssh import SshTransport
from paceline.spec.errors import ConnectError, NodeError, SettingError
from paceline.spec.formatting import shell_text
from paceline.spec.hosts import Host

_NETWORK = re.compile(r"--net(work)?(=(?!host$)|$)")
BY_PATH = "/dev/dri/by-path"  # not added by --device


@dataclass(frozen=True, slots=True)
class Container:
    """The container for one host's agent.

    Attributes:
        workdir: Working directory, which exists there.
        mounts: ``SOURCE:TARGET[:ro]`` each.
        uid, gid: Ids of the user who logged in.
        groups: Further group ids, for devices.
        devices: Device folders.
        nvidia: Whether it gets NVIDIA's devices.
        shm_size: Size of its /dev/shm.
        arguments: Further flags, passed through.
    """

    name: str
    image: str
    workdir: str = "/"
    mounts: tuple[str, ...] = ()
    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    nvidia: bool = False
    shm_size: str = "8g"
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """A host's image, user and devices.

    Attributes:
        digest: Digest of the image; empty if it is missing.
        engine_output: The engine's error message.
        uid, gid: Ids of the user who logged in.
        groups: Group ids of ``render`` and ``video``.
        folders: Requested folders that exist.
        dri, nvidia, kfd: Whether there are such devices; AMD's cards have kfd and dri.
        by_path: Whether there are links by which Level Zero identifies Intel's cards.
    """

    digest: str
    engine_output: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    folders: tuple[str, ...]
    dri: bool
    nvidia: bool
    kfd: bool = False
    by_path: bool = False


class Engine(Scheduler):
    """A container engine; subclasses define how to run a command and inspect an image.

    Attributes:
        probe: Shell text that prints the digest of the image ``$image``.
    """

    probe: str
    start_options = START_OPTIONS | SSH_OPTIONS | DETACH_OPTIONS | {
        "via_arg", "image", "mount", "shm_size", "wait_for_nodes",
    }  # fmt: skip

    def wrap(self, command: Sequence[str], container: Container) -> list[str]:
        """Returns the command that runs ``command`` in the container, with its streams."""
        raise NotImplementedError

    def remove(self, names: Sequence[str]) -> list[str]:
        """Returns the command that kills and removes containers; empty if none can remain."""
        return []

    def start(self, options: Options) -> Transport:
        if not options.container.image:
            raise SettingError(f"{self.option} needs an image", remedy="--image IMAGE")
        if networks := [word for word in options.arguments if _NETWORK.match(word)]:
            raise SettingError(
                "containers of Paceline use the network of their host",
                found=f"--via-arg={networks[0]}",
                remedy="Leave it out; --iface chooses the interface",
            )
        return ContainerTransport(self, options)


class ContainerTransport(SshTransport):
    """One container for each host, with the same image, for the agent and its ranks.

    A lost host gets another container, under another name, after the previous ones were removed.
    """

    def __init__(self, engine: Engine, options: Options) -> None:
        super().__init__(options)
        self._engine = engine
        self._options = options
        self._run = secrets.token_hex(4)
        self._digest = ""  # of the image, once all had the same
        self._local_hosts: set[str] = set()  # hosts that are this machine
        self._num_started: Counter[str] = Counter()  # containers, by host
        self._removable: dict[str, list[str]] = {}  # names of remaining containers, by host

    def to_json(self) -> dict[str, Any]:
        """Returns what another machine needs to restart lost containers, as JSON."""
        return {"engine": self._engine.name, "run": self._run, "digest": self._digest,
                "container": asdict(self._options.container)}  # fmt: skip

    @classmethod
    def from_json(cls, state: Mapping[str, Any], hosts: Sequence[Host]) -> ContainerTransport:
        """Returns a transport that restarts containers of another machine (:meth:`to_json`)."""
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in state["container"].items()
        }
        engine = load(state["engine"])
        assert isinstance(engine, Engine)
        transport = cls(engine, Options(container=ContainerOptions(**options)))
        transport._run, transport._digest = state["run"], state["digest"]
        for host in hosts:
            transport._num_started[host.name] = 1
            transport._removable[host.name] = [container_name(host.name, transport._run)]
        return transport

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   on_connected: ConnectedCallback = ignore_count) -> list[Channel]:  # fmt: skip
        """Checks the image on all hosts, then starts the agents.

        Raises NodeError if the image is missing or differs, or a lost container cannot be removed.
        """
        self._local_hosts |= {host.name for host in hosts if host.local}
        hosts = [replace(host, local=host.name in self._local_hosts) for host in hosts]
        wrap = await self.wrapping(hosts)
        await asyncio.gather(*(self._remove_lost(host) for host in hosts))
        channels = await connect_hosts(hosts, pythons, self._options.ssh, wrap, on_connected)
        for channel in channels:  # a container here has other files than this machine
            channel.host = replace(channel.host, local=False)
        return channels

    async def wrapping(self, hosts: Sequence[Host]) -> Wrap:
        """Returns the function that wraps an agent's command in a host's container.

        Raises:
            ConnectError: The login to a host failed.
            NodeError: A host cannot run the image, or has another one of that name.
        """
        results = await asyncio.gather(*map(self._probe, hosts))
        probes = dict(zip((host.name for host in hosts), results, strict=True))
        image = self._options.container.image
        self._digest = check_images(self._engine.name, image, probes, self._digest)

        def wrap(host: Host, agent: list[str]) -> list[str]:
            number = self._num_started[host.name]
            container = container_for(host, probes[host.name], self._options, self._run, number)
            self._num_started[host.name] += 1
            self._removable.setdefault(host.name, []).append(container.name)
            return self._engine.wrap(agent, container)

        return wrap

    async def _probe(self, host: Host) -> Probe:
        container = self._options.container
        command = probe_command(self._engine, container.image, container.folders)
        _, output = await self._run_on(host, command, "paceline-uid")
        return parse_probe(output)

    async def _run_on(self, host: Host, command: list[str],
                       mark: str = "\0") -> tuple[int | None, str]:  # fmt: skip
        """Returns status and output of a command on a host; ``mark`` shows that it ran."""
        argv = command if host.local else ssh_command(host, self._options.ssh, command)
        status, output = await run_command(argv, {})
        if not host.local and status == SSH_FAILED and mark not in output:
            refusal = classify(output, status, host)
            raise ConnectError(
                f"cannot log in to {host.name}: {refusal.cause}", found=refusal.details,
                remedy=refusal.remedy, brief=refusal.cause,
            )  # fmt: skip
        return status, output

    async def _remove_lost(self, host: Host) -> None:
        """Removes lost containers, which may still hold the GPUs."""
        names = list(self._removable.get(host.name, ()))
        command = self._engine.remove(names) if names else []
        if command:
            status, output = await self._run_on(host, command)
            if not is_removed(status, output):
                raise NodeError(
                    f"the container that {host.name} has lost cannot be removed",
                    found=output or "no word", remedy=f"On {host.name}: {shell_text(command)}",
                )  # fmt: skip
        remaining = self._removable.get(host.name, ())
        self._removable[host.name] = [name for name in remaining if name not in names]


def container_name(host: str, run: str, number: int = 0) -> str:
    """Returns the name of a host's container; ``number`` counts its earlier ones."""
    attempt = f".{number + 1}" if number else ""
    return f"paceline-{run}{attempt}-{re.sub(r'[^a-zA-Z0-9_.-]', '-', host)}"


def is_removed(status: int | None, output: str) -> bool:
    """Whether containers are removed, from the output of the removal. Pure.

    Docker fails for containers that do not exist or are already being removed.
    """
    lines = output.splitlines()
    harmless = [line for line in lines if _ALREADY_REMOVED.search(line)]
    errors = [line for line in lines if re.search("error|denied|cannot", line, re.IGNORECASE)]
    return status == 0 or (bool(harmless) and set(errors) <= set(harmless))


_ALREADY_REMOVED = re.compile(
    r"no such container|no container with|already in progress", re.IGNORECASE
)


def container_for(host: Host, probe: Probe, options: Options, run: str,
                  number: int = 0) -> Container:  # fmt: skip
    """Returns the container for one host's agent; ``number`` counts its earlier ones. Pure."""
    requested = options.container
    folders = tuple(f"{folder}:{folder}" for folder in probe.folders)
    mounted = {mount.split(":")[0] for mount in requested.mounts}
    project_mounts = tuple(mount for mount in folders if mount.split(":")[0] not in mounted)
    project = requested.folders[0] if requested.folders else ""
    by_path = (f"{BY_PATH}:{BY_PATH}:ro",) if probe.by_path else ()
    return Container(
        name=container_name(host.name, run, number),
        image=requested.image,
        workdir=project if project in probe.folders else "/",
        mounts=(*requested.mounts, *project_mounts, *by_path),
        uid=probe.uid,
        gid=probe.gid,
        groups=probe.groups if probe.dri else (),
        devices=(*(["/dev/dri"] if probe.dri else ()), *(["/dev/kfd"] if probe.kfd else ())),
        nvidia=probe.nvidia,
        shm_size=requested.shm_size,
        arguments=requested.arguments,
    )


_CAUSES = (
    (
        r"No such image|no such image|image not known|No such file",
        "the image is not there",
        "On {host}: {engine} pull {image} (or {engine} save here | {engine} load there)",
    ),
    (
        r"Cannot connect to the Docker daemon|connection refused",
        "the daemon is not running",
        "On {host}: sudo systemctl start {engine}",
    ),
    (
        r"permission denied",
        "no permission on the daemon's socket",
        "On {host}: sudo usermod -aG docker $USER, then log in again",
    ),
    (r"not found", "{engine} is not installed", "Install {engine} on {host}"),
)


def check_images(name: str, image: str, probes: Mapping[str, Probe], expected: str = "") -> str:
    """Returns the image's digest, which must be the same on all hosts. Pure.

    Args:
        name, image: The engine's and the image's name.
        probes: By host.
        expected: The digest on other hosts, if it is known.

    Raises:
        NodeError: A host lacks the image, or has another one of the same name.
    """
    missing = {host: probe.engine_output for host, probe in probes.items() if not probe.digest}
    if missing:
        raise _missing_image_error(name, image, missing)
    digests = {probe.digest for probe in probes.values()}
    if len(digests) > 1:
        source = next(iter(probes))
        raise NodeError(
            f"{image} is not the same image on all hosts",
            found="\n".join(f"{host}: {probe.digest[:19]}…" for host, probe in probes.items()),
            remedy=f"Copy it from {source}: {name} save {image} | ssh HOST {name} load",
        )
    (digest,) = digests
    if expected and digest != expected:
        raise NodeError(
            f"{image} on {', '.join(probes)} is not the image that the other hosts have",
            found=f"another image of that name: {digest[:19]}…, the others have {expected[:19]}…",
            remedy=f"Copy it there from another host: {name} save {image} | ssh HOST {name} load",
        )
    return digest


def _missing_image_error(name: str, image: str, outputs: Mapping[str, str]) -> NodeError:
    details, remedies = [], []
    for host, output in outputs.items():
        cause, remedy = f"{name} failed", f"Try there: {name} image inspect {image}"
        for pattern, message, advice in _CAUSES:
            if re.search(pattern, output):
                values = {"engine": name, "host": host, "image": image}
                cause, remedy = message.format(**values), advice.format(**values)
                break
        last_line = output.splitlines()[-1] if output else "no word"
        details.append(f"{host}: {cause}: {last_line}")
        remedies.append(remedy)
    return NodeError(
        f"{image} cannot be run on {', '.join(outputs)}",
        found="\n".join(details),
        remedy="\n".join(dict.fromkeys(remedies)),
    )


# --- what a host says of an image and of itself


# ``$1`` is the image, the folders follow
_PROBE_SCRIPT = (
    'image="$1"; shift; echo "paceline-uid $(id -u)"; echo "paceline-gid $(id -g)"; '
    "for g in render video; do "
    'n=$(getent group "$g" | cut -d: -f3); [ -z "$n" ] || echo "paceline-group $n"; done; '
    "[ ! -d /dev/dri ] || echo paceline-dri; [ ! -e /dev/nvidiactl ] || echo paceline-nvidia; "
    f"[ ! -e /dev/kfd ] || echo paceline-kfd; [ ! -d {BY_PATH} ] || echo paceline-by_path; "
    'for f in "$@"; do [ ! -d "$f" ] || echo "paceline-folder $f"; done; '
)


def probe_command(engine: Engine, image: str, folders: Sequence[str]) -> list[str]:
    """Returns the command that prints the fields of :class:`Probe`, for any login shell."""
    return ["/bin/sh", "-c", f"{_PROBE_SCRIPT}{engine.probe}", "paceline", image, *folders]


def parse_probe(text: str) -> Probe:
    """Parses the output of the probe's command, including the engine's errors."""
    values: dict[str, list[str]] = {}
    other_lines = []
    for line in text.splitlines():
        match = re.match(r"paceline-(\w+) ?(.*)", line)
        if match:
            values.setdefault(match.group(1), []).append(match.group(2))
        else:
            other_lines.append(line)
    return Probe(
        digest=values.get("digest", [""])[0],
        engine_output="\n".join(other_lines).strip(),
        uid=int(values.get("uid", ["0"])[0]),
        gid=int(values.get("gid", ["0"])[0]),
        groups=tuple(int(number) for number in values.get("group", [])),
        folders=tuple(values.get("folder", [])),
        dri="dri" in values,
        nvidia="nvidia" in values,
        kfd="kfd" in values,
        by_path="by_path" in values,
    )
