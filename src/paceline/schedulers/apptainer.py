"""Apptainer: an image is a file, and the user id stays. Rendered; not tested."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.schedulers.container import Container, Engine


class Apptainer(Engine):
    """Runs images that are files."""

    name, title = "apptainer", "Apptainer"
    start_options = Engine.start_options - {"shm_size"}
    is_tested = False
    probe = (
        'command -v apptainer >/dev/null || { echo "apptainer: not found"; exit; }; '
        'd=$(sha256sum "$image" 2>&1) && echo "paceline-digest ${d%% *}" || echo "$d"'
    )

    def wrap(self, command: Sequence[str], container: Container) -> list[str]:
        """Returns ``apptainer exec``, which uses the host's network, user, home and /dev/shm.

        It also mounts the host's /tmp, where other users make files. The cache is that of the home.
        """
        flags = ["exec", "--cleanenv", "--pwd", container.workdir]
        flags += [word for mount in container.mounts for word in ("--bind", mount)]
        flags += ["--nv"] if container.nvidia else []
        flags += [word for device in container.devices for word in ("--bind", device)]
        return ["apptainer", *flags, *container.arguments, container.image, *command]


SCHEDULER = Apptainer()
