"""Requests that prepare, start, watch and end the job's processes on this node."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Callable, Dict

from ..operations import describe_error, in_thread
from ..ranks import peer_filters
from ..surveys import facts, probe
from . import activation, inspection, processes

if TYPE_CHECKING:
    from ..operations import Agent

Message = Dict[str, Any]


def prepare(agent: Agent, request: Message, _: bytes) -> None:
    """Sources the scripts ``activate`` with this agent's environment, and starts the fork server.

    A thread first accesses the interpreter, because its disk may hang.
    """

    def start_fork_server() -> None:
        agent.job.prepare(request)
        agent.reply(request)

    def check_and_activate() -> None:
        if "/" in request["python"]:
            os.stat(request["python"])
        try:
            agent.job.activate(request)
        except activation.ActivationError as error:
            agent.reply(request, error=str(error), activating=True)
            return
        agent.on_loop(start_fork_server, request)

    agent.in_thread(check_and_activate, request)


def reserve_port(agent: Agent, request: Message, _: bytes) -> None:
    """Binds and holds a port on ``address``: ``port``, or a free one if that is 0."""
    if agent.reserved is not None:
        agent.reserved.close()
        agent.reserved = None
    agent.job.store.end()  # an earlier attempt's store may hold the port
    address, port = request["address"], request.get("port", 0)
    try:
        if port:
            agent.reserved = probe.listen(address, port)
        else:
            agent.reserved = probe.listen_outside_ephemeral(address, facts.ephemeral_ports())
    except OSError as error:
        holders = probe.listening_processes(port) if port else []
        agent.reply(request, error=describe_error(error), holders=holders)
        return
    peer_filters.attach_filter(agent.reserved, peer_filters.NO_HOSTS)  # until the store serves it
    agent.reply(request, port=agent.reserved.getsockname()[1])


def start(agent: Agent, request: Message, _: bytes) -> None:
    """Starts the ranks; with ``opens_store``, the held port becomes the store's."""
    listener, agent.reserved = agent.reserved, None
    try:
        agent.job.start(request, listener if request["opens_store"] else None)
    finally:
        if listener is not None:
            listener.close()  # the fork server has its own copy
    agent.reply(request)


def add_ranks(agent: Agent, request: Message, _: bytes) -> None:
    """Starts ranks in the running attempt, as ``start`` does."""
    agent.job.add(request)
    agent.reply(request)


def tell_ranks(agent: Agent, request: Message, _: bytes) -> None:
    """Sends ``line``, an object, to every running rank."""
    agent.job.send_to_ranks(request["line"])
    agent.reply(request)


def kill_ranks(agent: Agent, request: Message, _: bytes) -> None:
    """SIGKILLs ``ranks`` that are frozen, or that the others have continued without."""
    agent.reply(request, killed=agent.job.kill_ranks(request["ranks"]))


def open_store(agent: Agent, request: Message, _: bytes) -> None:
    """Opens a new rendezvous store on ``address`` while ranks run; answers its port.

    ``addresses``: addresses of the job's hosts. ``key``: of a closed store; else null.
    """
    agent.job.store.end()
    listener = probe.listen_outside_ephemeral(request["address"], facts.ephemeral_ports())
    with contextlib.closing(listener):  # the fork server has its own copy
        port = listener.getsockname()[1]
        store = {"address": request["address"], "port": port}
        if request["key"]:
            store["key"] = request["key"]
        agent.job.open_store(store, listener, request["addresses"])
    agent.reply(request, port=port)


def admit(agent: Agent, request: Message, _: bytes) -> None:
    """Lets ``addresses`` connect to the store and ranks here, because a host has joined."""
    agent.job.admit(request["addresses"])
    agent.reply(request)


def dump_stacks(agent: Agent, request: Message, _: bytes) -> None:
    """Asks every rank for its stack (``stacks``) and its collectives (``closely``)."""
    closely, stacks = bool(request.get("closely")), bool(request.get("stacks", True))
    inspection.request_dumps(agent.job.running_ranks(), closely, stacks)
    agent.reply(request)


@in_thread
def seen(agent: Agent, request: Message, _: bytes) -> None:
    """Answers the results of ``dump_stacks``, with the state of every process."""
    ranks, closely = agent.job.running_ranks(), bool(request.get("closely"))
    agent.reply(request, ranks=inspection.inspect(ranks, closely))


def stop(agent: Agent, request: Message, _: bytes) -> None:
    """Sends ``signal`` to every rank, SIGKILL after ``grace_s``.

    SIGINT is a user's request to stop; ranks that handle SIGTERM get that instead.
    """
    agent.job.stop(request["signal"], request["grace_s"])
    agent.reply(request)


def kill(agent: Agent, request: Message, _: bytes) -> None:
    """SIGKILLs all of the job's processes except fork server and store; answers their number."""
    agent.reply(request, killed=agent.job.kill())


def job_processes(agent: Agent, request: Message, _: bytes) -> None:
    """Answers the pids of the job's processes on this node, for tests and diagnosis."""
    members = processes.job_processes(agent.job.token, [], [])
    agent.reply(request, pids=[process.pid for process in members])


OPERATIONS: "Dict[str, Callable[[Agent, Message, bytes], None]]" = {
    "prepare": prepare,
    "reserve_port": reserve_port,
    "start": start,
    "add_ranks": add_ranks,
    "tell_ranks": tell_ranks,
    "kill_ranks": kill_ranks,
    "open_store": open_store,
    "admit": admit,
    "dump_stacks": dump_stacks,
    "seen": seen,
    "stop": stop,
    "kill": kill,
    "job_processes": job_processes,
}
