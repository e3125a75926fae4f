"""What the user may say about how the nodes are started."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.remote.openssh import SshOptions


@dataclass(frozen=True, slots=True)
class ContainerOptions:
    """The container that an agent and its ranks run in.

    Attributes:
        image: Name or digest of the image; the same content is required on every host.
        mounts: ``SOURCE:TARGET[:ro]`` each, as the engine writes them.
        folders: Folders of the launching machine that are mounted where a host has them too: the
            project first, in which the agent begins.
        shm_size: Size of /dev/shm in the container, as the engine writes it.
        arguments: Further flags for the engine's ``run``, passed through.
    """

    image: str = ""
    mounts: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    shm_size: str = "8g"
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Options:
    """Everything a transport may need; each takes what it understands.

    Attributes:
        ssh: How to log in, where SSH is used, be it by us or by MPI.
        interface: Interface on which agents connect; ``None`` for any address.
        arguments: Further flags for the program that starts the agents, passed through.
        mpiexec: Which ``mpiexec`` to use; ``None`` looks on ``PATH``.
        container: For the container engines.
    """

    ssh: SshOptions = SshOptions()
    interface: str | None = None
    arguments: tuple[str, ...] = ()
    mpiexec: str | None = None
    container: ContainerOptions = ContainerOptions()
