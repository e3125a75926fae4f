"""What is reported about the ranks of an attempt, and what follows for their states. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from paceline.launch.elastic.rank_states import (
    Host,
    Joined,
    Rank,
    RankStates,
    Recovered,
    UnexplainedFailure,
)
from paceline.launch.elastic.retry_policy import MAX_STRIKES
from paceline.spec.failure import NEWCOMER_DIVERGED, NEWCOMER_MISMATCH, UNFREED, Failure

INTERRUPT_TIMEOUT_S = 3.0  # for an interrupted rank, until it is known which rank is lost
PROGRAM_FAILURE_WAIT_S = 0.5  # for the same failure on other ranks
EXIT_GRACE_S = 1.0  # for a rank that has failed to end
SAVED_EXIT_CODE = 143  # of a rank that was asked to stop and has saved
STOPPED_PREFIX = "Stopped:"  # of the error that such a rank raises
EARLY_EXIT = "it ended with status 0 before it had joined"
_UNJOINABLE = (NEWCOMER_MISMATCH, NEWCOMER_DIVERGED)
# A child of a rank that was ended from outside, often because memory is short
WORKER_KILLED = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: (Killed|Terminated)")


class RankEvents(RankStates):
    """Records what ranks and agents report: one method for each kind of event."""

    def set_recoverable(self, slot: int, able: bool) -> None:
        """A rank has reported whether its training can go on without lost ranks."""
        self._ranks[slot].is_recoverable, self._ranks[slot].session_closed = able, False

    def close_session(self, slot: int) -> None:
        """A rank's training is over; no other rank could continue its script."""
        self._ranks[slot].session_closed = True

    def record_step(self, step: int | None) -> None:
        """A rank has reported its step."""
        if step is not None:
            self._step = max(self._step, step)
            self._confirm_steps("in")

    def record_progress(self, step: int | None) -> None:
        """A rank has reported that it goes on, and its step if that is known."""
        self.record_step(step)
        self._progress_at = self._now

    def interrupt_rank(self, slot: int, *, unreachable_host: str = "",
                       generation: int | None = None) -> None:  # fmt: skip
        """A rank had an error in a collective and waits for a new group.

        Args:
            unreachable_host: The host that it could not reach; empty after another kind of error.
            generation: The newest group that it knew.
        """
        host = self._ranks[slot].host
        if unreachable_host in self._hosts and unreachable_host != host:
            if self._step > max(self._blocked_pairs.values(), default=-1) + 1:
                self._blocked_pairs, self._blocked_at = {}, None
            self._blocked_pairs[frozenset((host, unreachable_host))] = self._step
            self._blocked_at = self._blocked_at or self._progress_at or self._now
        is_outdated = generation is not None and generation < self._generation.number
        if not is_outdated or self._generation.planned:  # else it has yet to hear of this group
            self._ranks[slot].interrupted_at = self._now

    def rank_arrived(self, slot: int) -> None:
        """A rank has left its group and waits for the other ranks of a new one."""
        self._ranks[slot].connects_to = None

    def group_gathered(self, slot: int, generation: int) -> None:
        """All ranks of a new group are there, and this one opens its connections."""
        self._ranks[slot].connects_to = generation
        if generation == self._generation.number and self._generation.gathered_at is None:
            self._generation.gathered_at = self._now

    def group_connected(self, slot: int, size: int) -> None:
        """A rank has all connections of a group of that size."""
        if size == len(self._generation.members):
            self._generation.connecting.discard(slot)

    def newcomer_ready(self, slot: int) -> None:
        """A newcomer can join."""
        rank = self._ranks[slot]
        if rank.state == "starting":
            rank.state, rank.ready_at = "ready", self._now

    def close_admission(self, slot: int, reason: str) -> None:
        """A member has passed the last place of the script at which newcomers can join.

        If it has not formed the group in which a newcomer was about to join, no member will.
        """
        if self._closed_reason or self._ranks[slot].state != "in":
            return
        self._close(reason)
        was_abandoned = self._generation.planned and slot in self._generation.regrouping
        if was_abandoned and self._broken_at is None:
            self._broken_at = self._now

    def regrouped(self, slot: int, generation: int, step: int | None) -> None:
        """A rank trains in a new generation from that step on."""
        self.record_step(step)
        self._ranks[slot].connects_to = None
        if generation != self._generation.number:
            return
        if step is not None:
            self._confirm_steps("lost", step)
        rank = self._ranks[slot]
        rank.interrupted_at = None
        if rank.hang_reason and not rank.killed:  # it has left the collective after all
            rank.hang_reason, rank.frozen = "", False
        if rank.state == "joining":
            rank.state, rank.is_recoverable, rank.joined_step = "in", True, self._step
            rank.joined_generation = generation
        self._generation.regrouping.discard(slot)
        if self.is_stable:
            self._complete_regroup()

    def rank_finished(self, slot: int) -> None:
        """A rank has ended with status 0."""
        rank = self._ranks[slot]
        rank.alive = False
        if rank.state == "in":
            rank.state = "done"
            group = self._generation
            if self.is_stopping and not group.planned and slot in group.regrouping:
                self._broken_at = self._now  # the others wait for it in the new group
            group.regrouping.discard(slot)
        elif rank.state in ("joining", "ready", "starting"):
            failure = Failure("early", rank.host, slot, self._now, 0, headline=EARLY_EXIT)
            self._drop(rank, failure)

    def rank_lost(self, slot: int, failure: Failure) -> None:
        """A rank was ended by a signal or has failed."""
        rank = self._ranks[slot]
        if self.is_stopping and failure.kind == "exception":
            rank.has_saved = failure.headline.startswith(STOPPED_PREFIX)
            return  # its end follows
        has_saved = rank.has_saved or failure.code == SAVED_EXIT_CODE
        if self.is_stopping and failure.kind == "exit" and has_saved:
            self.rank_finished(slot)
            return
        ended = failure.kind in ("signal", "exit")
        rank.alive = rank.alive and not ended
        is_unexplained = any(pending.slot == slot for pending in self._unexplained)
        if is_unexplained or rank.state in ("lost", "left out", "done"):
            return
        if not ended:
            rank.kill_at = self._now + EXIT_GRACE_S
        if rank.state != "in":
            self._drop(rank, replace(failure, headline=rank.hang_reason or failure.headline))
        elif rank.session_closed and failure.kind == "signal":
            self._fail(failure)
        elif failure.kind == "signal" or WORKER_KILLED.search(failure.headline):
            self._ended_by_signal(rank, failure)
        elif reason := next((text for text in _UNJOINABLE if text in failure.headline), ""):
            self._drop(rank, failure)
            self._close(reason)  # the next newcomer would fail in the same way
        else:
            wait_s = INTERRUPT_TIMEOUT_S if failure.is_secondary else PROGRAM_FAILURE_WAIT_S
            self._unexplained.append(UnexplainedFailure(self._now + wait_s, slot, failure))
            rank.interrupted_at = None

    def server_died(self, host: str, failure: Failure) -> None:
        """A host's fork server has died, and its ranks with it; their ends are reported, too."""
        if self._hosts[host].state == "up":
            self._hosts[host] = Host("no server")
        self._lose_host(host, failure)

    def server_up(self, host: str) -> None:
        """A host's fork server can start ranks."""
        if self._hosts[host].state != "up":
            self._hosts[host] = Host()
            for rank in self._in_state("left out"):
                if rank.host == host and self.accepts_newcomers:
                    self._schedule_restart(rank)

    def node_lost(self, host: str, failure: Failure, *, redials: bool = True) -> None:
        """A host or its agent is lost; its ranks count as ended, whatever they do."""
        if self._hosts[host].state not in ("lost", "gone"):
            self._hosts[host] = Host("lost" if redials else "gone", loss=failure)
        for rank in self._ranks.values():
            if rank.host == host:
                rank.alive, rank.kill_at = False, None
        self._lose_host(host, failure)

    def abandon_host(self, host: str) -> None:
        """A lost host will not come back."""
        self._hosts[host].state = "gone"

    def add_host(self, host: str, slots: Sequence[int]) -> None:
        """A host that had no ranks can start some: new ones, or those of a lost host."""
        self._hosts[host] = Host()
        for number in slots:
            if (rank := self._ranks.get(number)) is not None:
                self._hosts[rank.host] = Host("gone")
                rank.host = host
                if rank.state != "done":
                    rank.state, rank.failed_starts, rank.restart_at = "lost", 0, self._now
                    rank.joined_step = None
            else:
                self._ranks[number] = Rank(number, host, "lost", alive=False, lost_at=self._now,
                                           restart_at=self._now)  # fmt: skip

    def store_ended(self, host: str) -> None:
        """The rendezvous store is gone, in which newcomers find how the others began."""
        if host == self._store_host and not self._store_is_lost:
            self._store_is_lost = True
            for rank in self._in_state("starting"):
                self._kill(rank)
                self._schedule_restart(rank)

    def start_failed(self, host: str, slots: Sequence[int], reason: str = "") -> None:
        """An agent could not start newcomers."""
        for slot in slots:
            rank = self._ranks[slot]
            if rank.host != host:  # a spare has taken its ranks over meanwhile
                continue
            rank.alive = False
            if rank.state == "starting":
                self._drop(rank, Failure("agent", host, slot, self._now, headline=reason))

    def set_frozen(self, slot: int, stopped: bool) -> None:
        """A signal has stopped a rank for too long, or no longer stops it."""
        self._ranks[slot].frozen = stopped

    def set_hung(self, slot: int, headline: str) -> None:
        """The others have waited for a rank for too long: it is ended for that reason."""
        self._ranks[slot].frozen, self._ranks[slot].hang_reason = True, headline

    def _lose_host(self, host: str, failure: Failure) -> None:
        self.store_ended(host)
        host_ranks = [rank for rank in self._ranks.values() if rank.host == host]
        needed = any(rank.session_closed and rank.state == "in" for rank in host_ranks)
        if needed and not self._has_ended:
            self._fail(failure)
        for rank in host_ranks:
            if rank.state in ("in", "joining", "ready", "starting"):
                self._drop(rank, failure)
                rank.failed_starts, rank.restart_at, rank.joined_step = 0, self._now, None

    def _ended_by_signal(self, rank: Rank, failure: Failure) -> None:
        if rank.killed:
            headline = (
                rank.hang_reason or "stood still, stopped by a signal (SIGSTOP): it was ended"
            )
            failure = replace(failure, headline=headline)
            if headline.startswith(UNFREED):
                failure = replace(failure, kind="hang", signal=None)
        step, count = rank.strikes
        rank.strikes = (self._step, count + 1 if step == self._step else 1)
        if rank.strikes[1] >= MAX_STRIKES:
            self._fail(failure)
            return
        crash = self._policy.repeated_crash(failure, self._step, self._generation.number)
        if crash is None:
            self._drop(rank, failure)
        else:
            reason = f"ranks crash at the same step ({self._step}), on the same data"
            self._fail(crash, reason=f"{reason}: it is the program's own")

    def _complete_regroup(self) -> None:
        """Reports the loss or the join that is over now that all members train again."""
        if self._generation.planned:
            joined = tuple(s for s in self._generation.members if self._ranks[s].lost_at)
            if joined:
                lost_at = min(self._ranks[slot].lost_at for slot in joined)
                self._actions.append(Joined(joined, self._now - lost_at))
        elif self._lost_slots and not self._generation.is_paused:
            lost_at = min((failure.time for failure in self._losses), default=self._now)
            lost_at = max(lost_at, self._progress_before_break or lost_at)  # they still went on
            lost = dict(sorted(self._lost_slots.items()))
            self._actions.append(Recovered(
                losses=tuple(self._losses), slots=(*lost,), hosts=(*lost.values(),),
                num_survivors=len({*self._generation.members} - {*lost}),
                seconds=max(0.0, self._now - lost_at),
                is_final=self.is_stopping or self._abandon_reason is not None,
            ))  # fmt: skip
        for slot in self._generation.members:
            self._ranks[slot].lost_at = 0.0
        if not self._generation.is_paused:  # else the losses are reported once they train on
            self._losses, self._lost_slots = [], {}
        for rank in self._in_state("lost"):
            if rank.joined_step is not None:  # it joined but made no step
                rank.joined_step = None
                self._count_failed_start(rank)
