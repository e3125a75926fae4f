"""Tests random network partitions between hosts and launcher, one-way or both, by fake clocks.

Leases, folders and tokens are real; the delivery and timing of messages are simulated.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.agent.lease import Lease
from paceline.spec.training.checkpoint_manifest import FileEntry, Manifest
from paceline.train.checkpoints.format import write_chunks
from paceline.train.checkpoints.store import Fenced, Store

LEASE_S, TICK_S, SECONDS = 10.0, 1.0, 24
HOSTS = 4
LAUNCHER = -1


@dataclass
class Host:
    """A node with one rank: its knowledge, and its store of checkpoints."""

    number: int
    store: Store
    lease: Lease = field(default_factory=Lease)
    members: tuple[int, ...] = tuple(range(HOSTS))
    heard_at: float = 0.0  # when the launcher last heard it
    alive: bool = True

    @property
    def writes(self) -> bool:
        return self.alive and self.members[0] == self.number


def publish(store: Store, step: int) -> None:
    staged = store.temporary(step)
    entry = FileEntry(
        *write_chunks(staged / "weights.safetensors", iter([f"{store.token} {step}".encode()]))
    )
    store.publish(staged, Manifest(step, {"weights.safetensors": entry}, {}))
    store.prune(2)


def newest_version(root: Path) -> tuple[int, int]:
    (first, *_), problems = Store(root).scan()
    assert not problems
    first.manifest.verify(first.path)
    return first.version


class SimulatedJob:
    """Simulates a job with one partition, which begins after five seconds and may heal."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.shared = self.draw.random() < 0.5
        roots = [folder / ("disk" if self.shared else str(n)) for n in range(HOSTS)]
        self.hosts = [Host(n, Store(root)) for n, root in enumerate(roots)]
        self.group: tuple[int, ...] = tuple(range(HOSTS))  # as known to the launcher
        is_two_way = self.draw.random() < 0.5
        apart = self.draw.sample(range(HOSTS), self.draw.randrange(1, HOSTS))
        self.cut: set[tuple[int, int]] = set()  # (from, to)
        for one in apart:
            for other in {LAUNCHER, *range(HOSTS)} - {*apart}:
                directions = [(one, other), (other, one)]
                self.cut |= {*directions} if is_two_way else {directions[seed % 2]}
        self.heals_at = self.draw.choice([8.0, 14.0, 1e9])
        self.step, self.now = 1, 0.0
        self.fenced = self.late = 0
        self.claims: dict[Path, int] = {}  # newest token of each folder
        self.hosts[0].store.claim_token(0, "")
        for host in self.hosts:
            host.store.token = 1

    def hears(self, one: int, other: int) -> bool:
        """Returns whether messages of ``other`` reach ``one``."""
        apart = 5.0 <= self.now < self.heals_at
        return not (apart and (other, one) in self.cut)

    def run(self) -> None:
        while self.now < SECONDS:
            self.now += TICK_S
            self.keep_leases()
            self.lose()
            self.train()

    def keep_leases(self) -> None:
        for host in self.hosts:
            if host.number in self.group:
                if self.hears(host.number, LAUNCHER):
                    host.lease.renew(LEASE_S, self.now)
                if host.alive and self.hears(LAUNCHER, host.number):
                    host.heard_at = self.now
            if host.lease.is_ending(self.now):
                host.alive = False  # its agent has ended the rank

    def lose(self) -> None:
        """The launcher forms a new group without the hosts that were silent for long."""
        remaining = tuple(n for n in self.group if self.now - self.hosts[n].heard_at <= LEASE_S / 2)
        remaining = tuple(n for n in remaining if self.hosts[n].alive)
        if remaining == self.group or not remaining:
            self.group = remaining
            return
        remaining_hosts = [self.hosts[n] for n in remaining]
        is_connected = all(
            self.hears(a, b) for a in (*remaining, LAUNCHER) for b in (*remaining, LAUNCHER)
        )
        self.group = remaining
        if not is_connected:  # the next message or the end of their lease stops them
            return
        previous_writer = remaining_hosts[0].members[0]
        for host in remaining_hosts:
            host.members = remaining
        if remaining[0] != previous_writer:
            max_token = max(
                max(host.store.token, host.store.highest_token()) for host in remaining_hosts
            )
            remaining_hosts[0].store.claim_token(max_token, "")
            for host in remaining_hosts:
                host.store.token = remaining_hosts[0].store.token
            self.claims[remaining_hosts[0].store.root] = remaining_hosts[0].store.token

    def train(self) -> None:
        """A group steps if all its members hear each other; a writer may be late."""
        for host in self.hosts:
            if not host.writes:
                continue
            ranks = [self.hosts[n] for n in host.members]
            steps = all(self.hears(a.number, b.number) for a in ranks for b in ranks)
            steps = steps and all(one.alive and one.members == host.members for one in ranks)
            self.step += steps
            if self.draw.random() < 0.6:  # no checkpoint is due, or it is incomplete
                continue
            self.late += not steps
            is_superseded = self.claims.get(host.store.root, 1) > host.store.token
            try:
                publish(host.store, self.step)
                assert not is_superseded, f"{host.number} wrote beside a newer writer"
            except Fenced:
                assert is_superseded
                self.fenced += 1


@pytest.fixture(autouse=True)
def skip_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def test_200_partitions_never_have_two_writers(tmp_path: Path) -> None:
    fenced = late = moved = 0
    for seed in range(200):
        job = SimulatedJob(tmp_path / str(seed), seed)
        job.run()
        fenced, late = fenced + job.fenced, late + job.late
        for host in job.hosts:
            assert host.alive == (host.number in job.group), seed
        # whichever disk is used to resume, its checkpoint is of the newest writer
        versions = {host.store.root: newest_version(host.store.root) for host in job.hosts
                    if host.store.root.exists()}  # fmt: skip
        latest = max(versions.values())
        moved += bool(job.claims)
        if job.claims:
            assert latest[0] == max(job.claims.values()), seed
    assert moved > 50
    assert fenced > 20
    assert late > 100
