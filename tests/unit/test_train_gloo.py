"""Tests that a connection that wakes gloo's thread again and again is disarmed in epoll."""

from __future__ import annotations

import ctypes
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.agent.supervision import gloo_threads as agent_gloo
from paceline.train.elastic import gloo

DATA = 0x5511_2233_4455_6677  # has the size of a pointer
ADD = 1


@pytest.fixture
def closed_connection() -> Iterator[tuple[select.epoll, socket.socket]]:
    """A closed connection with unread data, and the epoll that watches it."""
    connection, peer = socket.socketpair()
    with connection, peer, select.epoll() as epoll:
        event = gloo._Event(select.EPOLLIN, DATA)
        added = ctypes.CDLL(None).epoll_ctl(
            epoll.fileno(), ADD, connection.fileno(), ctypes.byref(event)
        )
        assert added == 0
        peer.sendall(b"the rest")
        connection.shutdown(socket.SHUT_RDWR)
        yield epoll, connection


def fd_target(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def count_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def registrations(epoll: select.epoll) -> list[tuple[int, int, int, int]]:
    return [*gloo._registered(epoll.fileno())]


def test_disarmed_epoll_reports_hangup_once(
    closed_connection: tuple[select.epoll, socket.socket],
) -> None:
    epoll, connection = closed_connection
    initial = registrations(epoll)
    assert [epoll.poll(0) for _ in range(3)] == [[(DATA & 0xFFFFFFFF, 0x11)]] * 3
    assert gloo.disarm_epoll(connection.fileno(), fd_target(connection.fileno()))
    hangup = [
        (DATA & 0xFFFFFFFF, select.EPOLLHUP)
    ]  # gloo ignores this, as there is nothing to read
    assert [epoll.poll(0) for _ in range(3)] == [hangup, [], []]
    ((fd, _, data, inode),) = registrations(epoll)
    assert [(fd, data, inode)] == [(fd, data, inode) for fd, _, data, inode in initial]
    assert data == DATA
    assert not gloo.disarm_epoll(
        connection.fileno(), fd_target(connection.fileno())
    )  # already disarmed
    epoll.unregister(
        connection.fileno()
    )  # otherwise gloo would end the process when it finds nothing


def test_disarm_leaves_unrelated_descriptors(
    closed_connection: tuple[select.epoll, socket.socket],
) -> None:
    epoll, connection = closed_connection
    fd, target = connection.fileno(), fd_target(connection.fileno())
    initial, initial_count = registrations(epoll), count_descriptors()
    unrelated, unrelated_peer = socket.socketpair()
    with unrelated, unrelated_peer:
        epoll.register(unrelated, select.EPOLLIN)
        assert not gloo.disarm_epoll(unrelated.fileno(), target)  # the identity of another socket
        assert not gloo.disarm_epoll(
            fd, fd_target(unrelated.fileno())
        )  # the number is another socket's now
        assert not gloo.disarm_epoll(
            unrelated_peer.fileno(), fd_target(unrelated_peer.fileno())
        )  # not in any epoll
        unrelated_peer.sendall(b"x")
        assert (unrelated.fileno(), select.EPOLLIN) in epoll.poll(0)
        epoll.unregister(unrelated)
    assert registrations(epoll) == initial
    assert count_descriptors() == initial_count


def test_disarm_does_nothing_without_epoll_info(
    closed_connection: tuple[select.epoll, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    epoll, connection = closed_connection
    monkeypatch.setattr(gloo, "_registered", lambda _: iter(()))
    assert not gloo.disarm_epoll(connection.fileno(), fd_target(connection.fileno()))
    assert epoll.poll(0)


def test_tasks_include_current_thread() -> None:
    this_task = {task.number: task for task in gloo.tasks()}[os.getpid()]
    assert this_task.state == "R"
    assert this_task.cpu_s > 0
    assert not this_task.is_gloo


def test_agent_and_training_use_equal_thread_names() -> None:
    assert (gloo.LOOPS, gloo.WORKERS) == (agent_gloo.LOOP_THREADS, agent_gloo.WORKER_THREADS)


def test_waits_until_workers_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's rank reads the state of the workers from /proc."""
    states = iter("RSRSSS")
    monkeypatch.setattr(agent_gloo, "threads", lambda pid, name: [1])
    monkeypatch.setattr(
        agent_gloo.processes, "read_stat",
        lambda pid, worker: agent_gloo.processes.Stat(pid, 1, 1, next(states), 1),
    )  # fmt: skip
    agent_gloo.wait_for_idle_workers()
    assert next(states, None) is None
