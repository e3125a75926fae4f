"""Podman: as Docker, but without a daemon and with the user's own id. Rendered; not tried."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.schedulers.container import Container, Engine
from paceline.schedulers.docker import run


class Podman(Engine):
    """Without a daemon."""

    name, title = "podman", "Podman"
    tried = False
    probe = 'd=$(podman image inspect --format "{{.Id}}" "$image" 2>&1) && echo "paceline-digest $d" || echo "$d"'  # noqa: E501

    def wrap(self, command: Sequence[str], container: Container) -> list[str]:
        """``podman run`` in the host's network; files that it writes are the user's own."""
        keep = ["--userns=keep-id"] if container.uid else []
        nvidia = ["--device=nvidia.com/gpu=all"] if container.nvidia else []
        return ["podman", *run(container), *keep, *nvidia, *container.arguments, container.image,
                *command]  # fmt: skip

    def remove(self, names: Sequence[str]) -> list[str]:
        """As Docker's; those that are gone already are passed over."""
        return ["podman", "rm", "--force", "--ignore", *names]


SCHEDULER = Podman()
