"""Hosts and a launcher cut off from each other, one way or both, at random; by fake clocks.

Leases, folders and their tokens are the real ones; what is simulated is who hears whom, and when.
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
    """A node with one rank: what it knows, and where it writes."""

    number: int
    store: Store
    lease: Lease = field(default_factory=Lease)
    members: tuple[int, ...] = tuple(range(HOSTS))
    heard_at: float = 0.0  # by the launcher
    alive: bool = True

    @property
    def writes(self) -> bool:
        return self.alive and self.members[0] == self.number


def publish(store: Store, step: int) -> None:
    made = store.temporary(step)
    entry = FileEntry(*write_chunks(made / "weights", iter([f"{store.token} {step}".encode()])))
    store.publish(made, Manifest(step, {"weights": entry}, {}))
    store.prune(2)


def newest(root: Path) -> tuple[int, int]:
    (first, *_), bad = Store(root).scan()
    assert not bad
    first.manifest.verify(first.path)
    return first.version


class Story:
    """One job with one partition, which begins after five seconds and may heal."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.shared = self.draw.random() < 0.5
        roots = [folder / ("disk" if self.shared else str(n)) for n in range(HOSTS)]
        self.hosts = [Host(n, Store(root)) for n, root in enumerate(roots)]
        self.group: tuple[int, ...] = tuple(range(HOSTS))  # as the launcher has it
        both = self.draw.random() < 0.5
        apart = self.draw.sample(range(HOSTS), self.draw.randrange(1, HOSTS))
        self.cut: set[tuple[int, int]] = set()  # from, to
        for one in apart:
            for other in {LAUNCHER, *range(HOSTS)} - {*apart}:
                ways = [(one, other), (other, one)]
                self.cut |= {*ways} if both else {ways[seed % 2]}
        self.heals_at = self.draw.choice([8.0, 14.0, 1e9])
        self.step, self.now = 1, 0.0
        self.fenced = self.late = 0
        self.claims: dict[Path, int] = {}  # the newest token of each folder
        self.hosts[0].store.claim_token(0, "")
        for host in self.hosts:
            host.store.token = 1

    def hears(self, one: int, other: int) -> bool:
        """Whether what ``other`` says comes to ``one``."""
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
                host.alive = False  # its agent has ended its rank

    def lose(self) -> None:
        """The launcher makes a new group without those of whom it has heard nothing for long."""
        left = tuple(n for n in self.group if self.now - self.hosts[n].heard_at <= LEASE_S / 2)
        left = tuple(n for n in left if self.hosts[n].alive)
        if left == self.group or not left:
            self.group = left
            return
        told = [self.hosts[n] for n in left]
        meet = all(self.hears(a, b) for a in (*left, LAUNCHER) for b in (*left, LAUNCHER))
        self.group = left
        if not meet:  # the next word finds them, or their lease ends them
            return
        former = told[0].members[0]
        for host in told:
            host.members = left
        if left[0] != former:
            known = max(max(host.store.token, host.store.highest_token()) for host in told)
            told[0].store.claim_token(known, "")
            for host in told:
                host.store.token = told[0].store.token
            self.claims[told[0].store.root] = told[0].store.token

    def train(self) -> None:
        """A group steps where all of it hear each other; a writer may be late with what it has."""
        for host in self.hosts:
            if not host.writes:
                continue
            ranks = [self.hosts[n] for n in host.members]
            steps = all(self.hears(a.number, b.number) for a in ranks for b in ranks)
            steps = steps and all(one.alive and one.members == host.members for one in ranks)
            self.step += steps
            if self.draw.random() < 0.6:  # no checkpoint is due, or it is still being written
                continue
            self.late += not steps
            newer = self.claims.get(host.store.root, 1) > host.store.token
            try:
                publish(host.store, self.step)
                assert not newer, f"{host.number} wrote beside a newer writer"
            except Fenced:
                assert newer
                self.fenced += 1


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def test_two_hundred_partitions_and_never_two_writers(tmp_path: Path) -> None:
    fenced = late = moved = 0
    for seed in range(200):
        story = Story(tmp_path / str(seed), seed)
        story.run()
        fenced, late = fenced + story.fenced, late + story.late
        for host in story.hosts:
            assert host.alive == (host.number in story.group), seed
        # what would be resumed from is of the newest writer, on whichever disk it lies
        versions = {host.store.root: newest(host.store.root) for host in story.hosts
                    if host.store.root.exists()}  # fmt: skip
        last = max(versions.values())
        moved += bool(story.claims)
        if story.claims:
            assert last[0] == max(story.claims.values()), seed
    assert moved > 50
    assert fenced > 20
    assert late > 100
