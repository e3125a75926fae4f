"""Agents in containers, started over SSH (here without it): what all engines have in common.

The agent runs in the container and its ranks with it. An engine is a scheduler of its own.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.remote.channel import Channel, Wrap
from paceline.remote.fanout import connect_all
from paceline.remote.openssh import SSH_FAILED, classify, ssh_command
from paceline.remote.transport import Reached, Transport, nobody
from paceline.rendezvous.started import said_by
from paceline.schedulers import load
from paceline.schedulers.scheduler import (
    LEAVE,
    LOGIN,
    NOW,
    ContainerOptions,
    Options,
    Scheduler,
)
from paceline.spec.command import shell_text
from paceline.spec.errors import ConnectError, NodeError, SettingError
from paceline.spec.hosts import Host

BY_PATH = "/dev/dri/by-path"  # --device brings the devices alone
CACHE = "/tmp/paceline-cache"  # noqa: S108 - a folder inside the container, gone with it


@dataclass(frozen=True, slots=True)
class Container:
    """The container for one host's agent.

    Attributes:
        name: Its name there.
        image: Name of the image.
        workdir: Folder in which it begins; it exists there.
        mounts: ``SOURCE:TARGET[:ro]`` each.
        env: Variables that are no secret.
        uid, gid: Who runs in it: the user who logged in.
        groups: Further group ids, for devices.
        devices: Device folders that it sees.
        nvidia: Whether NVIDIA's devices are to be seen.
        shm_size: Size of its /dev/shm.
        arguments: Further flags, passed through.
    """

    name: str
    image: str
    workdir: str = "/"
    mounts: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    nvidia: bool = False
    shm_size: str = "8g"
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """What a host says of an image and of itself.

    Attributes:
        digest: Of the image there; empty when it cannot be had.
        words: What the engine said instead.
        uid, gid: Of the user who logged in.
        groups: Group ids of ``render`` and ``video``.
        folders: Which of the wanted folders exist.
        dri, nvidia, kfd: Whether there are such devices; kfd is AMD's, beside its ``dri``.
        by_path: Whether there are links by which Level Zero tells Intel's cards apart.
    """

    digest: str
    words: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    folders: tuple[str, ...]
    dri: bool
    nvidia: bool
    kfd: bool = False
    by_path: bool = False


class Engine(Scheduler):
    """A container engine. Each says only how it runs a command and what it knows of an image.

    Attributes:
        probe: Shell text that says what the image ``$image`` is on a host.
    """

    probe: str
    starting = NOW | LOGIN | LEAVE | {"via_arg", "image", "mount", "shm_size", "wait_for_nodes"}

    def wrap(self, command: Sequence[str], container: Container) -> list[str]:
        """The command that runs ``command`` in the container, its standard streams passed on."""
        raise NotImplementedError

    def remove(self, names: Sequence[str]) -> list[str]:
        """The command that ends containers and removes them; empty where nothing can be left."""
        return []

    def start(self, options: Options) -> Transport:
        if not options.container.image:
            raise SettingError(f"{self.typed} needs an image", remedy="--image IMAGE")
        return ContainerTransport(self, options)


class ContainerTransport:
    """One container a host, with the same image, in which the agent and its ranks run.

    A host that was lost gets another one, under another name, once what may be left of those
    before has been removed.
    """

    redials = True
    dialects: tuple[str, ...] = ()

    def __init__(self, engine: Engine, options: Options) -> None:
        self._engine = engine
        self._options = options
        self._run = secrets.token_hex(4)
        self._digest = ""  # of the image, once all had the same
        self._here: set[str] = set()  # hosts that are this machine
        self._begun: Counter[str] = Counter()  # containers, by host
        self._left: dict[str, list[str]] = {}  # names of those that may still be there, by host

    def tell(self) -> dict[str, Any]:
        """What another machine must know that starts lost containers again, in terms of JSON."""
        return {"engine": self._engine.name, "run": self._run, "digest": self._digest,
                "container": asdict(self._options.container)}  # fmt: skip

    @classmethod
    def taken_over(cls, told: Mapping[str, Any], hosts: Sequence[Host]) -> ContainerTransport:
        """What starts again what another machine has started, and told of (:meth:`tell`)."""
        lists: dict[str, Any] = {
            name: tuple(one) if isinstance(one, list) else one
            for name, one in told["container"].items()
        }
        engine = load(told["engine"])
        assert isinstance(engine, Engine)
        transport = cls(engine, Options(container=ContainerOptions(**lists)))
        transport._run, transport._digest = told["run"], told["digest"]
        transport._begun.update(host.name for host in hosts)
        transport._left = {host.name: [name_of(host.name, transport._run)] for host in hosts}
        return transport

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: Reached = nobody) -> list[Channel]:  # fmt: skip
        """Looks at the image everywhere first; NodeError where it is missing or another one.

        NodeError, too, where a container that was lost cannot be removed.
        """
        self._here |= {host.name for host in hosts if host.local}
        hosts = [replace(host, local=host.name in self._here) for host in hosts]
        wrap = await self.wrapping(hosts)
        await asyncio.gather(*(self._remove_left(host) for host in hosts))
        channels = await connect_all(hosts, pythons, self._options.ssh, wrap, reached)
        for channel in channels:  # a container here has other files than this machine
            channel.host = replace(channel.host, local=False)
        return channels

    async def wrapping(self, hosts: Sequence[Host]) -> Wrap:
        """What puts an agent's command into a host's container.

        Raises:
            ConnectError: A host cannot be logged in to.
            NodeError: It cannot run the image, or has another one of that name.
        """
        probes = await self._probe_all(hosts)
        image = self._options.container.image
        self._digest = check_images(self._engine.name, image, probes, self._digest)

        def wrap(host: Host, agent: list[str]) -> list[str]:
            number = self._begun[host.name]
            container = container_for(host, probes[host.name], self._options, self._run, number)
            self._begun[host.name] += 1
            self._left.setdefault(host.name, []).append(container.name)
            return self._engine.wrap(agent, container)

        return wrap

    async def _probe_all(self, hosts: Sequence[Host]) -> dict[str, Probe]:
        probes = await asyncio.gather(*(self._probe(host) for host in hosts))
        return dict(zip((host.name for host in hosts), probes, strict=True))

    async def _probe(self, host: Host) -> Probe:
        container = self._options.container
        look = probe_command(self._engine, container.image, container.folders)
        _, words = await self._said_on(host, look, "paceline-uid")
        return parse_probe(words)

    async def _said_on(self, host: Host, command: list[str],
                       mark: str = "\0") -> tuple[int | None, str]:  # fmt: skip
        """Exit status and words of a command on a host; ``mark`` in them shows that it ran."""
        argv = command if host.local else ssh_command(host, self._options.ssh, command)
        status, words = await said_by(argv, {})
        if not host.local and status == SSH_FAILED and mark not in words:
            refusal = classify(words, status, host)
            raise ConnectError(
                f"cannot log in to {host.name}: {refusal.cause}", found=refusal.found,
                remedy=refusal.remedy, brief=refusal.cause,
            )  # fmt: skip
        return status, words

    async def _remove_left(self, host: Host) -> None:
        """A container that was lost may hold the GPUs, and would not let its ranks go."""
        names = list(self._left.get(host.name, ()))
        command = self._engine.remove(names) if names else []
        if command:
            status, words = await self._said_on(host, command)
            if not removed(status, words):
                raise NodeError(
                    f"the container that {host.name} has lost cannot be removed",
                    found=words or "no word", remedy=f"On {host.name}: {shell_text(command)}",
                )  # fmt: skip
        self._left[host.name] = [one for one in self._left.get(host.name, ()) if one not in names]

    async def close(self, exit_code: int) -> None:
        """Containers end with their agents."""

    async def why(self, host: Host) -> str:
        return ""


def name_of(host: str, run: str, number: int = 0) -> str:
    """Name of a host's container in a run; ``number``: how many it had before."""
    again = f".{number + 1}" if number else ""
    return f"paceline-{run}{again}-{re.sub(r'[^a-zA-Z0-9_.-]', '-', host)}"


def removed(status: int | None, words: str) -> bool:
    """Whether nothing is left of containers, from what their removal said. Pure.

    Docker calls it an error that there was nothing, or that it is about to be gone by itself.
    """
    lines = words.splitlines()
    nothing = [line for line in lines if _NOTHING_LEFT.search(line)]
    errors = [line for line in lines if re.search("error|denied|cannot", line, re.IGNORECASE)]
    return status == 0 or (bool(nothing) and set(errors) <= set(nothing))


_NOTHING_LEFT = re.compile(
    r"no such container|no container with|already in progress", re.IGNORECASE
)


def container_for(host: Host, probe: Probe, options: Options, run: str,
                  number: int = 0) -> Container:  # fmt: skip
    """The container for one host's agent; ``number``: how many it had before. Pure."""
    wanted = options.container
    folders = tuple(f"{folder}:{folder}" for folder in probe.folders)
    known = {mount.split(":")[0] for mount in wanted.mounts}
    own = tuple(mount for mount in folders if mount.split(":")[0] not in known)
    workdir = wanted.folders[0] if wanted.folders and wanted.folders[0] in probe.folders else "/"
    env = {"XDG_CACHE_HOME": CACHE}
    if probe.uid:
        env["HOME"] = "/tmp"  # noqa: S108 - the image may not know this user
    return Container(
        name=name_of(host.name, run, number),
        image=wanted.image,
        workdir=workdir,
        mounts=(*wanted.mounts, *own, *([f"{BY_PATH}:{BY_PATH}:ro"] if probe.by_path else ())),
        env=env,
        uid=probe.uid,
        gid=probe.gid,
        groups=probe.groups if probe.dri else (),
        devices=(*(["/dev/dri"] if probe.dri else ()), *(["/dev/kfd"] if probe.kfd else ())),
        nvidia=probe.nvidia,
        shm_size=wanted.shm_size,
        arguments=wanted.arguments,
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


def check_images(name: str, image: str, probes: Mapping[str, Probe], wanted: str = "") -> str:
    """The image's digest, the same everywhere. Pure.

    Args:
        name: The engine's.
        image: The image's.
        probes: What hosts say.
        wanted: The digest on other hosts, where it is known.

    Raises:
        NodeError: A host lacks the image, or has another one of the same name.
    """
    without = {host: probe.words for host, probe in probes.items() if not probe.digest}
    if without:
        raise _missing(name, image, without)
    digests = {probe.digest for probe in probes.values()}
    if len(digests) > 1:
        first = next(iter(probes))
        raise NodeError(
            f"{image} is not the same image on all hosts",
            found="\n".join(f"{host}: {probe.digest[:19]}…" for host, probe in probes.items()),
            remedy=f"Copy it from {first}: {name} save {image} | ssh HOST {name} load",
        )
    (digest,) = digests
    if wanted and digest != wanted:
        raise NodeError(
            f"{image} on {', '.join(probes)} is not the image that the other hosts have",
            found=f"another image of that name: {digest[:19]}…, the others have {wanted[:19]}…",
            remedy=f"Copy it there from another host: {name} save {image} | ssh HOST {name} load",
        )
    return digest


def _missing(name: str, image: str, without: Mapping[str, str]) -> NodeError:
    found, remedies = [], []
    for host, words in without.items():
        cause, remedy = f"{name} failed", f"Try there: {name} image inspect {image}"
        for pattern, message, advice in _CAUSES:
            if re.search(pattern, words):
                values = {"engine": name, "host": host, "image": image}
                cause, remedy = message.format(**values), advice.format(**values)
                break
        last = words.splitlines()[-1] if words else "no word"
        found.append(f"{host}: {cause}: {last}")
        remedies.append(remedy)
    return NodeError(
        f"{image} cannot be run on {', '.join(without)}",
        found="\n".join(found),
        remedy="\n".join(dict.fromkeys(remedies)),
    )


# --- what a host says of an image and of itself


# ``$1`` is the image, the folders follow
_ABOUT_HOST = (
    'image="$1"; shift; echo "paceline-uid $(id -u)"; echo "paceline-gid $(id -g)"; '
    "for g in render video; do "
    'n=$(getent group "$g" | cut -d: -f3); [ -z "$n" ] || echo "paceline-group $n"; done; '
    "[ ! -d /dev/dri ] || echo paceline-dri; [ ! -e /dev/nvidiactl ] || echo paceline-nvidia; "
    f"[ ! -e /dev/kfd ] || echo paceline-kfd; [ ! -d {BY_PATH} ] || echo paceline-by_path; "
    'for f in "$@"; do [ ! -d "$f" ] || echo "paceline-folder $f"; done; '
)


def probe_command(engine: Engine, image: str, folders: Sequence[str]) -> list[str]:
    """Asks a host for all that :class:`Probe` holds; one command, any login shell."""
    text = f"{_ABOUT_HOST}{engine.probe}"
    return ["/bin/sh", "-c", text, "paceline", image, *folders]


def parse_probe(text: str) -> Probe:
    """Reads what the probe's command printed, errors of the engine included."""
    found: dict[str, list[str]] = {}
    words = []
    for line in text.splitlines():
        match = re.match(r"paceline-(\w+) ?(.*)", line)
        if match:
            found.setdefault(match.group(1), []).append(match.group(2))
        else:
            words.append(line)
    return Probe(
        digest=found.get("digest", [""])[0],
        words="\n".join(words).strip(),
        uid=int(found.get("uid", ["0"])[0]),
        gid=int(found.get("gid", ["0"])[0]),
        groups=tuple(int(number) for number in found.get("group", [])),
        folders=tuple(found.get("folder", [])),
        dri="dri" in found,
        nvidia="nvidia" in found,
        kfd="kfd" in found,
        by_path="by_path" in found,
    )
