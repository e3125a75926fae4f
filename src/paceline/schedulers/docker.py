"""Docker."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.schedulers.container import Container, Engine


class Docker(Engine):
    """Through its daemon on each host."""

    name, title = "docker", "Docker"
    probe = 'd=$(docker image inspect --format "{{.Id}}" "$image" 2>&1) && echo "paceline-digest $d" || echo "$d"'  # noqa: E501

    def wrap(self, command: Sequence[str], container: Container) -> list[str]:
        """``docker run`` in the host's network; gone when the command ends."""
        return ["docker", *run(container), f"--user={container.uid}:{container.gid}",
                *gpus(container), *container.arguments, container.image, *command]  # fmt: skip

    def remove(self, names: Sequence[str]) -> list[str]:
        """Also those that run: a frozen one, or one that looks for its launcher."""
        return ["docker", "rm", "--force", *names]


def run(container: Container) -> list[str]:
    """What Docker and Podman understand alike."""
    flags = ["run", "--rm", "--interactive", "--init", f"--name={container.name}"]
    flags += ["--label=paceline", "--network=host", f"--shm-size={container.shm_size}"]
    flags += [f"--workdir={container.workdir}"]
    for mount in container.mounts:
        flags += ["--mount", bind(mount)]
    flags += [f"--env={name}={value}" for name, value in container.env.items()]
    flags += [f"--device={device}" for device in container.devices]
    return flags + [f"--group-add={group}" for group in container.groups]


def bind(mount: str) -> str:
    """``--mount`` refuses a folder that is not there, where ``--volume`` would make one as root."""
    source, _, rest = mount.partition(":")
    target, _, mode = rest.partition(":")
    fields = [f"type=bind,source={source}", f"target={target or source}"]
    return ",".join([*fields, *(["readonly"] if mode == "ro" else [])])


def gpus(container: Container) -> list[str]:
    return ["--gpus=all"] if container.nvidia else []


SCHEDULER = Docker()
