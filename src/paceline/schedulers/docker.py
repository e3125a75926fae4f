"""Docker."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.schedulers.container import Container, Engine


class Docker(Engine):
    """Runs containers through the daemon on each host."""

    name, title = "docker", "Docker"
    probe = 'd=$(docker image inspect --format "{{.Id}}" "$image" 2>&1) && echo "paceline-digest $d" || echo "$d"'  # noqa: E501

    def wrap(self, command: Sequence[str], container: Container) -> list[str]:
        """Returns ``docker run`` in the host's network; the container ends with the command."""
        flags = [f"--user={container.uid}:{container.gid}"]
        flags += ["--gpus=all"] if container.nvidia else []
        return ["docker", *run(container), *flags, *container.arguments, container.image,
                *with_private_cache(command, container)]  # fmt: skip

    def remove(self, names: Sequence[str]) -> list[str]:
        """Returns ``docker rm`` that also removes running containers."""
        return ["docker", "rm", "--force", *names]


def run(container: Container) -> list[str]:
    """Returns the flags that Docker and Podman share."""
    flags = ["run", "--rm", "--interactive", "--init", f"--name={container.name}"]
    flags += ["--label=paceline", "--network=host", f"--shm-size={container.shm_size}"]
    flags += [f"--workdir={container.workdir}"]
    for mount in container.mounts:
        flags += ["--mount", bind(mount)]
    flags += [f"--device={device}" for device in container.devices]
    return flags + [f"--group-add={group}" for group in container.groups]


def with_private_cache(command: Sequence[str], container: Container) -> list[str]:
    """Returns the command with a cache of its own, which is removed with the container.

    The folder has a random name, because a user may mount the host's /tmp, where others could make
    one of a fixed name first. It is also the home of a user whom the image may not know.
    """
    home = ' HOME="$d"' if container.uid else ""
    script = (
        'd=$(mktemp -d "${TMPDIR:-/tmp}/paceline-XXXXXX") && '
        f'export XDG_CACHE_HOME="$d"{home} && exec "$@"'
    )
    return ["/bin/sh", "-c", script, "paceline", *command]


def bind(mount: str) -> str:
    """Returns a value of ``--mount``, which does not make missing folders as root."""
    source, _, rest = mount.partition(":")
    target, _, mode = rest.partition(":")
    fields = [f"type=bind,source={source}", f"target={target or source}"]
    return ",".join([*fields, *(["readonly"] if mode == "ro" else [])])


SCHEDULER = Docker()
