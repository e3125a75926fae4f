"""What becomes known about the ranks and hosts of an attempt. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from paceline.launch.elastic.actions import Joined, Recovered
from paceline.launch.elastic.rank_states import Held, Host, Rank, RankStates
from paceline.spec.failure import NEWCOMER_DIVERGED, NEWCOMER_MISMATCH, Failure

ANSWER_S = 3.0  # how long a rank that was interrupted waits until somebody is known to be lost
OWN_S = 0.5  # a failure of the program's own waits so long for the same on other ranks
LEAVING_S = 1.0  # a rank that has failed may take so long to end
SAVED = 143  # the exit status of a rank that was asked to stop, and has saved
TOO_SOON = "it ended with status 0 before it had joined"
STOPPED = "Stopped:"  # so begins what it raises
# A child of a rank, ended from outside: the system's choice where memory is short
WORKER_KILLED = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: (Killed|Terminated)")


class RankEvents(RankStates):
    """Follows what ranks and agents report: one method for each kind of event."""

    def set_recoverable(self, slot: int, able: bool) -> None:
        """A rank has said whether its training goes on without ranks that are lost."""
        self._ranks[slot].able, self._ranks[slot].session_closed = able, False

    def close_session(self, slot: int) -> None:
        """A rank's training is over: nobody can do in its place what its script does now."""
        self._ranks[slot].session_closed = True

    def record_step(self, step: int | None, now: float | None = None) -> None:
        """A rank has told its step; ``now``: as a sign that it goes on."""
        if step is not None:
            self._step = max(self._step, step)
            self._confirm_steps("in")
        self._progress_at = self._progress_at if now is None else now

    def interrupt_rank(self, slot: int, now: float, *, silent: str = "",
                       generation: int | None = None) -> None:  # fmt: skip
        """A rank had an error in a collective, and waits for word.

        Args:
            slot: Which.
            now: The time.
            silent: The host that it could not hear; empty when its error is of another kind.
            generation: The newest group that it knew of.
        """
        host = self._ranks[slot].host
        if silent in self._hosts and silent != host:
            if self._step > max(self._silent_pairs.values(), default=-1) + 1:
                self._silent_pairs, self._silent_since = {}, None
            self._silent_pairs[frozenset((host, silent))] = self._step
            self._silent_since = self._silent_since or self._progress_at or now
        late = generation is not None and generation < self._generation.number
        if not late or self._generation.planned:  # else it will find the present group's word
            self._ranks[slot].interrupted_at = now

    def group_gathered(self, generation: int, now: float) -> None:
        """All ranks of a new group are there, and make its connections."""
        if generation == self._generation.number and self._generation.met_at is None:
            self._generation.met_at = now

    def group_connected(self, slot: int, size: int) -> None:
        """A rank has all connections of a group of that size."""
        if size == len(self._generation.members):
            self._generation.unformed.discard(slot)

    def newcomer_ready(self, slot: int, now: float) -> None:
        """A newcomer can join."""
        rank = self._ranks[slot]
        if rank.state == "starting":
            rank.state, rank.ready_at = "ready", now

    def door_closed(self, slot: int, why: str, now: float) -> None:
        """A member is past the place of the script at which newcomers join.

        All of them pass it together. Where this one has not made the group in which somebody was
        about to join, nobody makes it any more: another one follows.
        """
        if self._closed_reason or self._ranks[slot].state != "in":
            return
        self._close(why)
        never_made = self._generation.planned and slot in self._generation.unsettled
        if never_made and self._broken_at is None:
            self._broken_at = now

    def regrouped(self, slot: int, generation: int, step: int | None, now: float) -> None:
        """A rank trains in a new generation, from that step on."""
        self.record_step(step)
        if generation != self._generation.number:
            return
        if step is not None:
            self._confirm_steps("lost", step)
        rank = self._ranks[slot]
        rank.interrupted_at = None
        if rank.hung and not rank.killed:  # it has come out after all
            rank.hung, rank.frozen = "", False
        if rank.state == "joining":
            rank.state, rank.able, rank.joined_at = "in", True, self._step
            rank.came = generation
        self._generation.unsettled.discard(slot)
        if self.is_settled:
            self._settle(now)

    def rank_done(self, slot: int, now: float) -> None:
        """A rank has ended in order."""
        rank = self._ranks[slot]
        rank.alive = False
        if rank.state == "in":
            rank.state = "done"
            group = self._generation
            if self._is_stopping and not group.planned and slot in group.unsettled:
                self._broken_at = now  # it left before it heard of the group: others wait for it
            group.unsettled.discard(slot)
        elif rank.state in ("joining", "ready", "starting"):
            self._drop(rank, Failure("early", rank.host, slot, now, 0, headline=TOO_SOON), now)

    def rank_lost(self, slot: int, failure: Failure, now: float) -> None:
        """A rank was ended by a signal, or has failed by itself."""
        rank = self._ranks[slot]
        if self._is_stopping and failure.kind == "exception":
            rank.saved = failure.headline.startswith(STOPPED)
            return  # its end follows
        if self._is_stopping and failure.kind == "exit" and (rank.saved or failure.code == SAVED):
            self.rank_done(slot, now)
            return
        ended = failure.kind in ("signal", "exit")
        rank.alive = rank.alive and not ended
        held = any(held.slot == slot for held in self._held)
        if held or rank.state in ("lost", "left out", "done"):
            return
        if not ended:
            rank.kill_at = now + LEAVING_S
        if rank.state != "in":
            self._drop(rank, replace(failure, headline=rank.hung or failure.headline), now)
        elif rank.session_closed and failure.kind == "signal":
            self._fail(failure)
        elif failure.kind == "signal" or WORKER_KILLED.search(failure.headline):
            self._ended_by_signal(rank, failure, now)
        elif why := next(
            (text for text in (NEWCOMER_MISMATCH, NEWCOMER_DIVERGED) if text in failure.headline),
            "",
        ):
            self._drop(rank, failure, now)
            self._close(why)  # the next one would do the same
        else:
            until = now + (ANSWER_S if failure.is_secondary else OWN_S)
            self._held.append(Held(until, slot, failure))
            rank.interrupted_at = None

    def server_died(self, host: str, failure: Failure, now: float) -> None:
        """A host's fork server has died, and its ranks with it: their ends are told, too."""
        if self._hosts[host].state == "up":
            self._hosts[host] = Host("no server")
        self._lose_host(host, failure, now)

    def server_up(self, host: str) -> None:
        """A host's fork server can start ranks."""
        if self._hosts[host].state != "up":
            self._hosts[host] = Host()
            for rank in self._in_state("left out"):
                # what stood in its way may be over
                if rank.host == host and self.accepts_newcomers:
                    self._restart_later(rank)

    def node_lost(self, host: str, failure: Failure, now: float, *, redials: bool = True) -> None:
        """A host has gone away, or its agent has; its ranks count as gone, whatever they do."""
        if self._hosts[host].state not in ("lost", "gone"):
            self._hosts[host] = Host("lost" if redials else "gone", why=failure)
        for rank in self._ranks.values():
            if rank.host == host:
                rank.alive, rank.kill_at = False, None
        self._lose_host(host, failure, now)

    def node_gone(self, host: str) -> None:
        """A host that was lost will not come back."""
        self._hosts[host].state = "gone"

    def add_host(self, host: str, slots: Sequence[int], now: float) -> None:
        """A host that had no part in the job can start ranks.

        They are further ones, or lost ones of another host, which is not waited for any more.
        """
        self._hosts[host] = Host()
        for number in slots:
            if (rank := self._ranks.get(number)) is not None:
                self._hosts[rank.host] = Host("gone")
                rank.host = host
                if rank.state != "done":
                    rank.state, rank.tries, rank.next_try = "lost", 0, now
                    rank.joined_at = None
            else:
                new = Rank(number, host, "lost", alive=False, lost_at=now, next_try=now)
                self._ranks[number] = new

    def store_ended(self, host: str) -> None:
        """The rendezvous store there is gone; newcomers find in it how the others began."""
        if host == self._store_host and not self._store_is_lost:
            self._store_is_lost = True
            for rank in self._in_state("starting"):
                self._kill(rank)
                self._restart_later(rank)

    def start_failed(self, host: str, slots: Sequence[int], now: float, why: str = "") -> None:
        """The agent could not start newcomers."""
        for slot in slots:
            rank = self._ranks[slot]
            if rank.host != host:  # a spare has taken its ranks over meanwhile
                continue
            rank.alive = False
            if rank.state == "starting":
                self._drop(rank, Failure("agent", host, slot, now, headline=why), now)

    def set_frozen(self, slot: int, stopped: bool) -> None:
        """A signal has stopped a rank for too long, or no longer does."""
        self._ranks[slot].frozen = stopped

    def set_hung(self, slot: int, headline: str) -> None:
        """The others have waited for a rank for too long: it is ended, with these words."""
        self._ranks[slot].frozen, self._ranks[slot].hung = True, headline

    def _lose_host(self, host: str, failure: Failure, now: float) -> None:
        self.store_ended(host)
        here = [rank for rank in self._ranks.values() if rank.host == host]
        if any(rank.session_closed and rank.state == "in" for rank in here) and not self._is_over:
            self._fail(failure)
        for rank in here:
            if rank.state in ("in", "joining", "ready", "starting"):
                self._drop(rank, failure, now)
                rank.tries, rank.next_try, rank.joined_at = 0, now, None

    def _ended_by_signal(self, rank: Rank, failure: Failure, now: float) -> None:
        if rank.killed:
            headline = rank.hung or "stood still, stopped by a signal (SIGSTOP): it was ended"
            failure = replace(failure, headline=headline)
        step, count = rank.strikes
        rank.strikes = (self._step, count + 1 if step == self._step else 1)
        if not self._policy.replaces_killed(rank.strikes[1]):
            self._fail(failure)
        elif (crash := self._repeated_crash(failure)) is not None:
            self._fail(crash, why=f"ranks crash at the same step ({self._step}), on the same data:"
                       " it is the program's own")  # fmt: skip
        else:
            self._drop(rank, failure, now)

    def _repeated_crash(self, failure: Failure) -> Failure | None:
        return self._policy.repeated_crash(failure, self._step, self._generation.number)

    def _settle(self, now: float) -> None:
        """All members train in the present generation."""
        if self._generation.planned:
            joined = tuple(s for s in self._generation.members if self._ranks[s].lost_at)
            if joined:
                since = min(self._ranks[slot].lost_at for slot in joined)
                self._actions.append(Joined(joined, now - since))
        elif self._lost_slots and not self._generation.holds:
            since = min((failure.time for failure in self._losses), default=now)
            since = max(since, self._last_progress_at or since)  # nobody heard it, and they did
            lost = dict(sorted(self._lost_slots.items()))
            num_others = len({*self._generation.members} - {*lost})
            seconds = max(0.0, now - since)
            last = self._is_stopping or self._give_up_reason is not None
            self._actions.append(Recovered(tuple(self._losses), (*lost,), num_others, seconds, last,
                                        (*lost.values(),)))  # fmt: skip
        for slot in self._generation.members:
            self._ranks[slot].lost_at = 0.0
        if not self._generation.holds:  # else all of it is told once they train on
            self._losses, self._lost_slots = [], {}
        for rank in self._in_state("lost"):
            if rank.joined_at is not None:  # it has joined in vain, as if it had not
                rank.joined_at = None
                self._count_failed_start(rank, now)
