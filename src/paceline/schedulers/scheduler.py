"""What a scheduler is: six verbs, of which it has those that start nodes now, or later, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.remote.openssh import SshOptions
from paceline.spec.errors import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.remote.transport import Transport
    from paceline.rendezvous.endpoint import Endpoint
    from paceline.schedulers.script import BatchRequest
    from paceline.spec.hosts import Host

# Options of the command line that a scheduler understands, by their parameters' names.
NOW = frozenset({  # of those that start nodes now
    "hosts", "fastest", "ship", "follow_links", "as_json", "verbose",
})  # fmt: skip
LOGIN = frozenset({"ssh_config", "accept_new_host_keys"})  # where SSH is used, by us or by it
LEAVE = frozenset({"detach", "keep", "supervisor", "keep_results"})  # for runs that are left
SCRIPT = frozenset({  # of those that take a script
    "ship", "follow_links", "time_limit", "partition", "account", "mem", "gres", "gpus",
    "gpus_per_node", "array", "sbatch_arg", "setup_command",
})  # fmt: skip


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
    """Everything that a start may need; each scheduler takes what it understands.

    Attributes:
        ssh: How to log in, where SSH is used, be it by us or by MPI.
        interface: Interface on which agents connect; ``None`` for any address.
        arguments: Further flags for the program that starts the agents, passed through.
        mpiexec: Which ``mpiexec`` to use; ``None`` looks on ``PATH``.
        container: For the container engines.
        endpoint: Where nodes meet on which the same command is typed.
    """

    ssh: SshOptions = SshOptions()
    interface: str | None = None
    arguments: tuple[str, ...] = ()
    mpiexec: str | None = None
    container: ContainerOptions = ContainerOptions()
    endpoint: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class JobState:
    """How a scheduler sees a job that was submitted.

    Attributes:
        word: The scheduler's own word, kept as it is: also one that we do not know.
        reason: Its reason, empty for none.
        over: Nothing more will happen. False for a word that we do not know.
        exit_code: The job's exit status; never 0 for a job that did not complete.
        may_return: It is over, but the scheduler may be about to put it back: look twice.
        passing: Of no interest to anybody: it is about to change.
        queued_s: How long it waited before it began, in seconds; ``None`` when that is not told.
    """

    word: str
    reason: str = ""
    over: bool = False
    exit_code: int = 1
    may_return: bool = False
    passing: bool = False
    queued_s: float | None = None

    def describe(self) -> str:
        return f"{self.word} ({self.reason})" if self.reason else self.word


class Scheduler:
    """Something that starts the nodes of a job.

    It may start agents now (:meth:`start`), or take a script and start the job later
    (:meth:`render`, :meth:`submit`, :meth:`poll`, :meth:`cancel`), or both: then it does the first
    inside an :meth:`allocation` and the second outside of one. What it lacks it refuses.

    Attributes:
        name: As in ``--via NAME``, and of its module.
        title: What people call it.
        starting: Options of the command line that :meth:`start` understands, besides those that
            everything does; ``None`` when it starts nothing now.
        submitting: The same for :meth:`render`; ``None`` when it takes no scripts.
        typed: How it is asked for.
        hand_over: What a person types to submit a script, where :meth:`submit` cannot.
        script: File name of the script in the run directory.
        output: The same for the job's output; ``{job}`` stands for its id.
        job_id: Regular expression of its jobs' ids.
        history: Command that tells of jobs that are long over; ``{job}`` as above.
        keeps_secrets: Its scripts hold what nobody else may read: a rendezvous' key, and the values
            of forwarded variables.
        tried: Whether scripts were ever tried on a real one.
        direct: The launcher starts the agents itself, over SSH or here: no other program does.
        calls_back: Its nodes connect to this machine, which they have to reach.
        knows_hosts: False where nodes come by themselves: nobody can name them before.
        fixed: Why the number of nodes cannot change while a job runs; empty where it can.
    """

    name: str
    title: str
    starting: frozenset[str] | None = None
    submitting: frozenset[str] | None = None
    typed: str = ""
    hand_over: str = ""
    script: str = "job.sh"
    output: str = ""
    job_id: str = r"[0-9][0-9._+\[\]-]*"
    history: str = ""
    keeps_secrets: bool = False
    tried: bool = True
    direct: bool = False
    calls_back: bool = False
    knows_hosts: bool = True
    fixed: str = ""

    def __init_subclass__(cls) -> None:
        if not cls.typed and hasattr(cls, "name"):
            cls.typed = f"--via {cls.name}"

    # -- where we are

    def allocation(self, environ: Mapping[str, str]) -> str | None:
        """The id of the allocation that we are in; ``None`` outside of one."""
        return None

    def hosts(self, environ: Mapping[str, str]) -> str:
        """What ``-H`` would be given for the allocation's nodes. Only inside of one."""
        return self.name

    # -- the verbs

    def start(self, options: Options) -> Transport:
        """What starts one agent a node, now. Nothing is started before the transport is opened.

        Raises:
            SettingError: It cannot start anything here, and what would help.
        """
        raise self._cannot("starts no nodes from here")

    def render(self, request: BatchRequest) -> str:
        """The script that is to be submitted. Pure: the same request gives the same text.

        Raises:
            SettingError: Something of the request cannot be written down.
        """
        raise self._cannot("takes no scripts")

    def submit(self, script: Path) -> str:
        """Submits a script that was written; returns the job's id.

        Raises:
            SettingError: There is no command for it here, or the scheduler's own refusal.
        """
        raise self._cannot(f"is submitted to by a person: {self.hand_over}")

    async def poll(self, job: str) -> JobState | None:
        """Looks at a job, at any time after :meth:`submit`; ``None`` when it is not known."""
        raise self._cannot("tells nothing of jobs")

    def cancel(self, job: str, kill: bool = False) -> None:
        """Asks for a job's end, at any time after :meth:`submit`; over already is no error.

        Args:
            job: Its id.
            kill: At once, without time to save anything.
        """
        raise self._cannot("cancels no jobs")

    async def why(self, host: Host) -> str:
        """Why a node went, in the scheduler's own words, while a job runs; empty for no idea."""
        return ""

    def _cannot(self, what: str) -> SettingError:
        return SettingError(f"{self.title} {what}", found=self.typed)

    def follows(self) -> bool:
        """Whether jobs can be submitted and followed from here."""
        return type(self).submit is not Scheduler.submit
