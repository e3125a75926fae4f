"""Podman: like Docker, but without a daemon and with the user's own id. Rendered; not tested."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.schedulers.container import Container, Engine
from paceline.schedulers.docker import run, with_private_cache


class Podman(Engine):
    """Runs containers without a daemon."""

    name, title = "podman", "Podman"
    is_tested = False
    probe = 'd=$(podman image inspect --format "{{.Id}}" "$image" 2>&1) && echo "paceline-digest $d" || echo "$d"'  # noqa: E501

    def wrap(self, command: Sequence[str], container: Container) -> list[str]:
        """Returns ``podman run`` in the host's network; files that it writes are the user's."""
        flags = ["--userns=keep-id"] if container.uid else []
        flags += ["--device=nvidia.com/gpu=all"] if container.nvidia else []
        return ["podman", *run(container), *flags, *container.arguments, container.image,
                *with_private_cache(command, container)]  # fmt: skip

    def remove(self, names: Sequence[str]) -> list[str]:
        """Returns ``podman rm`` that ignores missing containers."""
        return ["podman", "rm", "--force", "--ignore", *names]


SCHEDULER = Podman()
