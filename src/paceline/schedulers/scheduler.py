"""What a scheduler is: it starts nodes now, or takes a script and starts them later, or both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paceline.remote.openssh import SshOptions
from paceline.spec.errors import SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.remote.transport import Transport
    from paceline.rendezvous.endpoint import Endpoint
    from paceline.schedulers.script import BatchRequest
    from paceline.spec.hosts import Host

# Parameters of command-line options that schedulers understand
START_OPTIONS = frozenset({  # schedulers that start nodes now
    "hosts", "fastest", "ship", "follow_links", "as_json", "verbose",
})  # fmt: skip
SSH_OPTIONS = frozenset({"ssh_config", "accept_new_host_keys"})  # schedulers that use SSH
DETACH_OPTIONS = frozenset({"detach", "keep", "supervisor", "keep_results"})
SCRIPT_OPTIONS = frozenset({  # schedulers that take a script
    "ship", "follow_links", "time_limit", "partition", "account", "mem", "gres", "gpus",
    "gpus_per_node", "array", "sbatch_arg", "setup_command",
})  # fmt: skip

_MAX_NAMED = 4  # failed tasks of an array in one line


@dataclass(frozen=True, slots=True)
class ContainerOptions:
    """The container that an agent and its ranks run in.

    Attributes:
        image: Name or digest of the image, which must be the same on every host.
        mounts: ``SOURCE:TARGET[:ro]`` each, in the engine's syntax.
        folders: Folders of the launching machine that are mounted if the host has them, too; the
            first is the project, which is the working directory.
        shm_size: Size of /dev/shm in the container, in the engine's syntax.
        arguments: Further flags for the engine's ``run``, passed through.
    """

    image: str = ""
    mounts: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    shm_size: str = "8g"
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Options:
    """Options for starting nodes; each scheduler uses those it understands.

    Attributes:
        ssh: How to log in, if we or MPI use SSH.
        interface: Interface on which agents connect; ``None`` for any address.
        arguments: Further flags for the program that starts the agents, passed through.
        mpiexec: ``mpiexec`` to use; ``None`` searches ``PATH``.
        container: Options of the container engines.
        endpoint: Rendezvous address of nodes that run the same command.
    """

    ssh: SshOptions = SshOptions()
    interface: str | None = None
    arguments: tuple[str, ...] = ()
    mpiexec: str | None = None
    container: ContainerOptions = ContainerOptions()
    endpoint: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class JobState:
    """The scheduler's state of a submitted job.

    Attributes:
        state: The scheduler's own name of the state, even if it is unknown to us.
        reason: The scheduler's reason; empty for none.
        is_over: Whether the job has ended; False for unknown states.
        exit_code: Exit status of the job; never 0 for a job that did not complete.
        may_return: Whether the scheduler may requeue a job that is over.
        is_transient: Whether the state is not worth reporting, because it is about to change.
        queued_s: Seconds in the queue; ``None`` if unknown.
        tasks: States of the tasks of a job array, by index; empty for other jobs.
    """

    state: str
    reason: str = ""
    is_over: bool = False
    exit_code: int = 1
    may_return: bool = False
    is_transient: bool = False
    queued_s: float | None = None
    tasks: Mapping[int, JobState] = field(default_factory=dict)

    def describe(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state

    def failed_tasks(self) -> list[int]:
        return sorted(i for i, task in self.tasks.items() if task.is_over and task.exit_code)

    def describe_tasks(self) -> str:
        """Returns how many tasks of an array finished, and which failed; empty for other jobs."""
        if not self.tasks:
            return ""
        num_finished = sum(task.is_over and not task.exit_code for task in self.tasks.values())
        text = f"{num_finished} of {len(self.tasks)} tasks finished"
        failed = self.failed_tasks()
        named = [f"{i} (exit status {self.tasks[i].exit_code})" for i in failed[:_MAX_NAMED]]
        remainder = f" and {len(failed) - len(named)} more" if len(failed) > len(named) else ""
        return f"{text}; failed: {', '.join(named)}{remainder}" if failed else text


def array_state(tasks: Mapping[int, JobState]) -> JobState:
    """Returns the state of a job array, which ends with its last task. Pure.

    It has the words of a task that runs, else of one that waits, else of the first that failed; its
    exit status is that of the first that failed.
    """
    ordered = [tasks[index] for index in sorted(tasks)]
    unfinished = sorted((task for task in ordered if not task.is_over), key=_has_reason)
    failed = [task for task in ordered if task.is_over and task.exit_code]
    return replace(
        (unfinished or failed or ordered)[0],
        is_over=not unfinished,
        exit_code=next((task.exit_code for task in (*failed, *unfinished)), 0),
        may_return=any(task.may_return for task in ordered),
        tasks=tasks,
    )


def _has_reason(task: JobState) -> bool:
    return bool(task.reason)  # schedulers give one for a task that waits


def array_ranges(text: str) -> list[range]:
    """Returns the indices of a job array, as in ``1,4-9:2%3``; leaves out what it cannot read."""
    indices, _, _ = text.partition("%")
    number = "[0-9]{1,9}"
    parts = [re.fullmatch(f"({number})(?:-({number}))?(?::({number}))?", part)
             for part in indices.split(",")]  # fmt: skip
    return [range(int(part[1]), int(part[2] or part[1]) + 1, int(part[3] or 1) or 1)
            for part in parts if part]  # fmt: skip


class Scheduler:
    """Starts the nodes of a job.

    It starts agents now (:meth:`start`), or takes a script and starts the job later
    (:meth:`render`, :meth:`submit`, :meth:`poll`, :meth:`cancel`), or both: the first inside an
    :meth:`allocation` and the second outside of one. Unsupported methods raise SettingError.

    Attributes:
        name: Name for ``--via NAME``, and of its module.
        title: Name for people.
        start_options: Command-line options of its own that :meth:`start` understands; ``None`` if
            it cannot start nodes now.
        submit_options: The same for :meth:`render`; ``None`` if it takes no scripts.
        option: The option that selects it.
        submit_command: Command to type to submit a script, if :meth:`submit` cannot.
        script: File name of the script in the run directory.
        output: File name of the job's output; ``{job}`` stands for the job's id.
        job_id: Regular expression of a job's id.
        history: Command that shows jobs that ended long ago; ``{job}`` as above.
        stores_secrets: Whether scripts contain the rendezvous key and forwarded variables.
        is_tested: Whether scripts have been tested on a real one.
        is_direct: Whether the launcher itself starts the agents, over SSH or on this machine.
        needs_callback: Whether nodes connect to this machine.
        accepts_hosts: False if nodes join by themselves and cannot be named before.
        fixed_size_reason: Why the number of nodes cannot change during a job; empty if it can.
    """

    name: str
    title: str
    start_options: frozenset[str] | None = None
    submit_options: frozenset[str] | None = None
    option: str = ""
    submit_command: str = ""
    script: str = "job.sh"
    output: str = ""
    job_id: str = r"[0-9][0-9._+\[\]-]*"
    history: str = ""
    stores_secrets: bool = False
    is_tested: bool = True
    is_direct: bool = False
    needs_callback: bool = False
    accepts_hosts: bool = True
    fixed_size_reason: str = ""

    def __init_subclass__(cls) -> None:
        if not cls.option and hasattr(cls, "name"):
            cls.option = f"--via {cls.name}"

    # -- where we are

    def allocation(self, environ: Mapping[str, str]) -> str | None:
        """Returns the id of the allocation that we are in; ``None`` outside of one."""
        return None

    def hosts(self, environ: Mapping[str, str]) -> str:
        """Returns the value of ``-H`` for the nodes of the allocation that we are in."""
        return self.name

    # -- the verbs

    def start(self, options: Options) -> Transport:
        """Returns the transport that starts one agent on each node when it is opened.

        Raises SettingError if nothing can be started here.
        """
        raise self._cannot("starts no nodes from here")

    def render(self, request: BatchRequest) -> str:
        """Returns the script to submit. Pure.

        Raises SettingError if part of the request cannot be expressed.
        """
        raise self._cannot("takes no scripts")

    def submit(self, script: Path) -> str:
        """Submits a script; returns the job's id.

        Raises SettingError if the command is missing, or the scheduler refuses the script.
        """
        raise self._cannot(f"is submitted to by a person: {self.submit_command}")

    async def poll(self, job: str) -> JobState | None:
        """Returns the state of a submitted job; ``None`` if the scheduler does not know it."""
        raise self._cannot("tells nothing of jobs")

    def cancel(self, job: str, kill: bool = False) -> None:
        """Cancels a submitted job; does nothing if it is over.

        Args:
            job: Id of the job.
            kill: Whether to kill it without time to save anything.
        """
        raise self._cannot("cancels no jobs")

    async def loss_reason(self, host: Host) -> str:
        """Returns the scheduler's reason for the loss of a node; empty if unknown."""
        return ""

    def _cannot(self, what: str) -> SettingError:
        return SettingError(f"{self.title} {what}", found=self.option)

    def can_follow(self) -> bool:
        """Whether jobs can be submitted and followed from this machine."""
        return type(self).submit is not Scheduler.submit
