"""What wakes a thread again and again is told to it once more, and never again."""

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

DATA = 0x5511_2233_4455_6677  # as long as a pointer
ADD = 1


@pytest.fixture
def cut() -> Iterator[tuple[select.epoll, socket.socket]]:
    """A connection that has ended with something in it, and the epoll that knows it."""
    one, other = socket.socketpair()
    with one, other, select.epoll() as epoll:
        event = gloo._Event(select.EPOLLIN, DATA)
        added = ctypes.CDLL(None).epoll_ctl(epoll.fileno(), ADD, one.fileno(), ctypes.byref(event))
        assert added == 0
        other.sendall(b"the rest")
        one.shutdown(socket.SHUT_RDWR)
        yield epoll, one


def what(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def registered(epoll: select.epoll) -> list[tuple[int, int, int, int]]:
    return [*gloo._registered(epoll.fileno())]


def test_an_epoll_speaks_of_it_once_more(cut: tuple[select.epoll, socket.socket]) -> None:
    epoll, one = cut
    before = registered(epoll)
    assert [epoll.poll(0) for _ in range(3)] == [[(DATA & 0xFFFFFFFF, 0x11)]] * 3
    assert gloo.disarm_epoll(one.fileno(), what(one.fileno()))
    ended = [(DATA & 0xFFFFFFFF, select.EPOLLHUP)]  # nothing to read: gloo passes over that
    assert [epoll.poll(0) for _ in range(3)] == [ended, [], []]
    ((fd, _, data, inode),) = registered(epoll)
    assert [(fd, data, inode)] == [(fd, data, inode) for fd, _, data, inode in before]
    assert data == DATA
    assert not gloo.disarm_epoll(one.fileno(), what(one.fileno()))  # it is already
    epoll.unregister(one.fileno())  # where there is nothing gloo ends the process


def test_nothing_else_is_touched(cut: tuple[select.epoll, socket.socket]) -> None:
    epoll, one = cut
    fd, was = one.fileno(), what(one.fileno())
    before, open_before = registered(epoll), descriptors()
    here, there = socket.socketpair()
    with here, there:
        epoll.register(here, select.EPOLLIN)
        assert not gloo.disarm_epoll(here.fileno(), was)  # the number of another
        assert not gloo.disarm_epoll(fd, what(here.fileno()))  # its number is another's by now
        assert not gloo.disarm_epoll(there.fileno(), what(there.fileno()))  # no epoll knows it
        there.sendall(b"x")
        assert (here.fileno(), select.EPOLLIN) in epoll.poll(0)
        epoll.unregister(here)
    assert registered(epoll) == before
    assert descriptors() == open_before


def test_where_the_system_tells_nothing_of_an_epoll_nothing_is_done(
    cut: tuple[select.epoll, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    epoll, one = cut
    monkeypatch.setattr(gloo, "_registered", lambda _: iter(()))
    assert not gloo.disarm_epoll(one.fileno(), what(one.fileno()))
    assert epoll.poll(0)


def test_this_thread_is_among_those_of_the_process() -> None:
    own = {task.number: task for task in gloo.tasks()}[os.getpid()]
    assert own.state == "R"
    assert own.cpu_s > 0
    assert not own.is_gloo


def test_agent_and_training_mean_the_same_threads() -> None:
    assert (gloo.LOOPS, gloo.WORKERS) == (agent_gloo.LOOP_THREADS, agent_gloo.WORKER_THREADS)


def test_a_group_is_left_when_its_workers_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen by a script's rank, whose workers appear by their state in /proc."""
    states = iter("RSRSSS")
    monkeypatch.setattr(agent_gloo, "threads", lambda pid, name: [1])
    monkeypatch.setattr(
        agent_gloo.processes, "read_stat",
        lambda pid, worker: agent_gloo.processes.Stat(pid, 1, 1, next(states), 1),
    )  # fmt: skip
    agent_gloo.wait_for_idle_workers()
    assert next(states, None) is None
