"""Decides which ranks train together, and what follows when some are lost or come back. Pure.

:class:`RankEvents` has one method for each kind of event. :meth:`Members.decide` then returns what
is to be done, each action once. A group that lost a member is formed anew without it at once. A
rank that is started in its place joins between two steps, once it is ready.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from paceline.launch.elastic.rank_states import (
    Action,
    Dial,
    End,
    ExcludeHost,
    Generation,
    Host,
    Joined,
    Kill,
    Prepare,
    Rank,
    RankAbandoned,
    RanksNotReplaced,
    RankStates,
    Recovered,
    Regroup,
    Start,
    Stop,
    UnexplainedFailure,
    Wait,
)
from paceline.spec.failure import NEWCOMER_DIVERGED, NEWCOMER_MISMATCH, Failure

INTERRUPT_TIMEOUT_S = (
    3.0  # how long a rank that was interrupted waits until somebody is known to be lost
)
PROGRAM_FAILURE_WAIT_S = (
    0.5  # a failure of the program's own waits so long for the same on other ranks
)
EXIT_GRACE_S = 1.0  # a rank that has failed may take so long to end
SAVED_EXIT_CODE = 143  # the exit status of a rank that was asked to stop, and has saved
EARLY_EXIT = "it ended with status 0 before it had joined"
STOPPED_PREFIX = "Stopped:"  # so begins what it raises
# A child of a rank, ended from outside: the system's choice where memory is short
WORKER_KILLED = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: (Killed|Terminated)")
JOIN_WINDOW_S = 1.0  # newcomers that are ready wait so long for others that are about to be
KILL_RETRY_S = 5.0  # after which a rank that was to be ended and lives is ended once more
DEADLOCK_TIMEOUT_S = (
    10.0  # all that have the training's state hang for so long: they are ended, too
)
STATE_TRANSFER_S = (
    1.0  # in which who joins may still get the state when the ranks are asked to stop
)
STOP_TIMEOUT_S = 10.0  # for the last regrouping, before ranks are asked to stop in any case
CONNECT_TIMEOUT_S = 15.0  # for connections of a new group, once all its ranks are there
EXCLUSION_S = 30.0  # to which a host that was sent away is dialled later, twice as long each time
MAX_EXCLUSION_S = 600.0


class RankEvents(RankStates):
    """Follows what ranks and agents report: one method for each kind of event."""

    def set_recoverable(self, slot: int, able: bool) -> None:
        """A rank has said whether its training goes on without ranks that are lost."""
        self._ranks[slot].able, self._ranks[slot].session_closed = able, False

    def close_session(self, slot: int) -> None:
        """A rank's training is over: nobody can do in its place what its script does now."""
        self._ranks[slot].session_closed = True

    def record_step(self, step: int | None, timestamp: float | None = None) -> None:
        """A rank has told its step; ``now``: as a sign that it goes on."""
        if step is not None:
            self._step = max(self._step, step)
            self._confirm_steps("in")
        self._progress_at = self._progress_at if timestamp is None else timestamp

    def interrupt_rank(self, slot: int, timestamp: float, *, unreachable_host: str = "",
                       generation: int | None = None) -> None:  # fmt: skip
        """A rank had an error in a collective, and waits for word.

        Args:
            slot: Which.
            now: The time.
            unreachable_host: The host that it could not hear; empty when its error is of another kind.
            generation: The newest group that it knew of.
        """
        host = self._ranks[slot].host
        if unreachable_host in self._hosts and unreachable_host != host:
            if self._step > max(self._blocked_pairs.values(), default=-1) + 1:
                self._blocked_pairs, self._blocked_at = {}, None
            self._blocked_pairs[frozenset((host, unreachable_host))] = self._step
            self._blocked_at = self._blocked_at or self._progress_at or timestamp
        is_outdated = generation is not None and generation < self._generation.number
        if (
            not is_outdated or self._generation.planned
        ):  # else it will find the present group's word
            self._ranks[slot].interrupted_at = timestamp

    def group_gathered(self, generation: int, timestamp: float) -> None:
        """All ranks of a new group are there, and make its connections."""
        if generation == self._generation.number and self._generation.gathered_at is None:
            self._generation.gathered_at = timestamp

    def group_connected(self, slot: int, size: int) -> None:
        """A rank has all connections of a group of that size."""
        if size == len(self._generation.members):
            self._generation.connecting.discard(slot)

    def newcomer_ready(self, slot: int, timestamp: float) -> None:
        """A newcomer can join."""
        rank = self._ranks[slot]
        if rank.state == "starting":
            rank.state, rank.ready_at = "ready", timestamp

    def close_admission(self, slot: int, reason: str, timestamp: float) -> None:
        """A member is past the place of the script at which newcomers join.

        All of them pass it together. Where this one has not made the group in which somebody was
        about to join, nobody makes it any more: another one follows.
        """
        if self._closed_reason or self._ranks[slot].state != "in":
            return
        self._close(reason)
        was_abandoned = self._generation.planned and slot in self._generation.regrouping
        if was_abandoned and self._broken_at is None:
            self._broken_at = timestamp

    def regrouped(self, slot: int, generation: int, step: int | None, timestamp: float) -> None:
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
            rank.joined_generation = generation
        self._generation.regrouping.discard(slot)
        if self.is_stable:
            self._complete_regroup(timestamp)

    def rank_finished(self, slot: int, timestamp: float) -> None:
        """A rank has ended in order."""
        rank = self._ranks[slot]
        rank.alive = False
        if rank.state == "in":
            rank.state = "done"
            group = self._generation
            if self._is_stopping and not group.planned and slot in group.regrouping:
                self._broken_at = (
                    timestamp  # it left before it heard of the group: others wait for it
                )
            group.regrouping.discard(slot)
        elif rank.state in ("joining", "ready", "starting"):
            self._drop(
                rank,
                Failure("early", rank.host, slot, timestamp, 0, headline=EARLY_EXIT),
                timestamp,
            )

    def rank_lost(self, slot: int, failure: Failure, timestamp: float) -> None:
        """A rank was ended by a signal, or has failed by itself."""
        rank = self._ranks[slot]
        if self._is_stopping and failure.kind == "exception":
            rank.saved = failure.headline.startswith(STOPPED_PREFIX)
            return  # its end follows
        if (
            self._is_stopping
            and failure.kind == "exit"
            and (rank.saved or failure.code == SAVED_EXIT_CODE)
        ):
            self.rank_finished(slot, timestamp)
            return
        ended = failure.kind in ("signal", "exit")
        rank.alive = rank.alive and not ended
        is_unexplained = any(is_unexplained.slot == slot for is_unexplained in self._unexplained)
        if is_unexplained or rank.state in ("lost", "left out", "done"):
            return
        if not ended:
            rank.kill_at = timestamp + EXIT_GRACE_S
        if rank.state != "in":
            self._drop(rank, replace(failure, headline=rank.hung or failure.headline), timestamp)
        elif rank.session_closed and failure.kind == "signal":
            self._fail(failure)
        elif failure.kind == "signal" or WORKER_KILLED.search(failure.headline):
            self._ended_by_signal(rank, failure, timestamp)
        elif reason := next(
            (text for text in (NEWCOMER_MISMATCH, NEWCOMER_DIVERGED) if text in failure.headline),
            "",
        ):
            self._drop(rank, failure, timestamp)
            self._close(reason)  # the next one would do the same
        else:
            deadline = timestamp + (
                INTERRUPT_TIMEOUT_S if failure.is_secondary else PROGRAM_FAILURE_WAIT_S
            )
            self._unexplained.append(UnexplainedFailure(deadline, slot, failure))
            rank.interrupted_at = None

    def server_died(self, host: str, failure: Failure, timestamp: float) -> None:
        """A host's fork server has died, and its ranks with it: their ends are told, too."""
        if self._hosts[host].state == "up":
            self._hosts[host] = Host("no server")
        self._lose_host(host, failure, timestamp)

    def server_up(self, host: str) -> None:
        """A host's fork server can start ranks."""
        if self._hosts[host].state != "up":
            self._hosts[host] = Host()
            for rank in self._in_state("left out"):
                # what stood in its way may be over
                if rank.host == host and self.accepts_newcomers:
                    self._schedule_restart(rank)

    def node_lost(
        self, host: str, failure: Failure, timestamp: float, *, redials: bool = True
    ) -> None:
        """A host has gone away, or its agent has; its ranks count as gone, whatever they do."""
        if self._hosts[host].state not in ("lost", "gone"):
            self._hosts[host] = Host("lost" if redials else "gone", loss=failure)
        for rank in self._ranks.values():
            if rank.host == host:
                rank.alive, rank.kill_at = False, None
        self._lose_host(host, failure, timestamp)

    def abandon_host(self, host: str) -> None:
        """A host that was lost will not come back."""
        self._hosts[host].state = "gone"

    def add_host(self, host: str, slots: Sequence[int], timestamp: float) -> None:
        """A host that had no part in the job can start ranks.

        They are further ones, or lost ones of another host, which is not waited for any more.
        """
        self._hosts[host] = Host()
        for number in slots:
            if (rank := self._ranks.get(number)) is not None:
                self._hosts[rank.host] = Host("gone")
                rank.host = host
                if rank.state != "done":
                    rank.state, rank.failed_starts, rank.next_try = "lost", 0, timestamp
                    rank.joined_at = None
            else:
                rank = Rank(
                    number, host, "lost", alive=False, lost_at=timestamp, next_try=timestamp
                )
                self._ranks[number] = rank

    def store_ended(self, host: str) -> None:
        """The rendezvous store there is gone; newcomers find in it how the others began."""
        if host == self._store_host and not self._store_is_lost:
            self._store_is_lost = True
            for rank in self._in_state("starting"):
                self._kill(rank)
                self._schedule_restart(rank)

    def start_failed(
        self, host: str, slots: Sequence[int], timestamp: float, reason: str = ""
    ) -> None:
        """The agent could not start newcomers."""
        for slot in slots:
            rank = self._ranks[slot]
            if rank.host != host:  # a spare has taken its ranks over meanwhile
                continue
            rank.alive = False
            if rank.state == "starting":
                self._drop(
                    rank, Failure("agent", host, slot, timestamp, headline=reason), timestamp
                )

    def set_frozen(self, slot: int, stopped: bool) -> None:
        """A signal has stopped a rank for too long, or no longer does."""
        self._ranks[slot].frozen = stopped

    def set_hung(self, slot: int, headline: str) -> None:
        """The others have waited for a rank for too long: it is ended, with these words."""
        self._ranks[slot].frozen, self._ranks[slot].hung = True, headline

    def _lose_host(self, host: str, failure: Failure, timestamp: float) -> None:
        self.store_ended(host)
        host_ranks = [rank for rank in self._ranks.values() if rank.host == host]
        if (
            any(rank.session_closed and rank.state == "in" for rank in host_ranks)
            and not self._has_ended
        ):
            self._fail(failure)
        for rank in host_ranks:
            if rank.state in ("in", "joining", "ready", "starting"):
                self._drop(rank, failure, timestamp)
                rank.failed_starts, rank.next_try, rank.joined_at = 0, timestamp, None

    def _ended_by_signal(self, rank: Rank, failure: Failure, timestamp: float) -> None:
        if rank.killed:
            headline = rank.hung or "stood still, stopped by a signal (SIGSTOP): it was ended"
            failure = replace(failure, headline=headline)
        step, count = rank.strikes
        rank.strikes = (self._step, count + 1 if step == self._step else 1)
        if not self._policy.replaces_killed(rank.strikes[1]):
            self._fail(failure)
        elif (crash := self._repeated_crash(failure)) is not None:
            self._fail(crash, reason=f"ranks crash at the same step ({self._step}), on the same data:"
                       " it is the program's own")  # fmt: skip
        else:
            self._drop(rank, failure, timestamp)

    def _repeated_crash(self, failure: Failure) -> Failure | None:
        return self._policy.repeated_crash(failure, self._step, self._generation.number)

    def _complete_regroup(self, timestamp: float) -> None:
        """All members train in the present generation."""
        if self._generation.planned:
            joined = tuple(s for s in self._generation.members if self._ranks[s].lost_at)
            if joined:
                lost_at = min(self._ranks[slot].lost_at for slot in joined)
                self._actions.append(Joined(joined, timestamp - lost_at))
        elif self._lost_slots and not self._generation.is_paused:
            lost_at = min((failure.time for failure in self._losses), default=timestamp)
            lost_at = max(
                lost_at, self._progress_before_break or lost_at
            )  # nobody heard it, and they did
            lost = dict(sorted(self._lost_slots.items()))
            num_survivors = len({*self._generation.members} - {*lost})
            seconds = max(0.0, timestamp - lost_at)
            is_final = self._is_stopping or self._abandon_reason is not None
            self._actions.append(Recovered(tuple(self._losses), (*lost,), num_survivors, seconds, is_final,
                                        (*lost.values(),)))  # fmt: skip
        for slot in self._generation.members:
            self._ranks[slot].lost_at = 0.0
        if not self._generation.is_paused:  # else all of it is told once they train on
            self._losses, self._lost_slots = [], {}
        for rank in self._in_state("lost"):
            if rank.joined_at is not None:  # it has joined in vain, as if it had not
                rank.joined_at = None
                self._count_failed_start(rank, timestamp)


class Members(RankEvents):
    """The ranks of one attempt: says what is to be done about them."""

    def end_strays(self, sides: Sequence[Sequence[int]], headline: str) -> bool:
        """Ranks wait in different collectives, for good.

        Where those that were there first all wait in one, who has come since goes another way, as
        a loop does that counts from its own beginning: it is ended, and nobody else comes.

        Args:
            sides: The slots that wait in the same one.
            headline: Why these are ended.

        Returns:
            Whether the others go on.
        """
        trains = {rank.number: rank.joined_generation for rank in self._in_state("in")}
        first = {slot for slot, generation in trains.items() if generation == min(trains.values())}
        majority = next((side for side in sides if first <= {*side}), None)
        if majority is None or self._is_stopping:
            return False
        strays = [slot for slot in trains if slot not in majority]
        for slot in strays:
            self.set_hung(slot, headline)
        if strays:
            self._close(NEWCOMER_DIVERGED)
        return bool(strays)

    def retry_group(self, timestamp: float) -> bool:
        """All ranks wait for each other in one collective, for too long.

        Returns:
            Whether they do it again in a new group: once at a step, and while all are there.
        """
        departed = self._in_state("done") or self._in_state("joining")
        is_abandoned = self._abandon_reason is not None
        if departed or self._retried_step >= self._step or not self.is_stable or is_abandoned:
            return False
        for rank in self._in_state("in"):
            rank.interrupted_at = timestamp - INTERRUPT_TIMEOUT_S
        return True

    def separate(
        self, pairs: Sequence[tuple[str, str]], progress_at: float, timestamp: float
    ) -> bool:
        """Hosts do not hear each other, which is certain: nobody tries to meet once more.

        Args:
            pairs: Two hosts each.
            progress_at: When the ranks gave their last sign.
            now: The time.

        Returns:
            Whether the others go on without one host of each pair.
        """
        is_connecting = self._is_connecting and not self._is_stopping
        if (
            self._broken_at is not None
            or not (self.is_stable or is_connecting)
            or self._unexplained
        ):
            return False
        if self._has_ended or self._abandon_reason is not None or self._in_state("done"):
            return False
        # not the pairs that errors suggested
        self._blocked_pairs = {frozenset(pair): self._step for pair in pairs}
        self._blocked_at = progress_at
        return self._exclude_blocked(timestamp)

    def stop(self) -> None:
        """The ranks are asked to save and stop.

        They go on without what is lost meanwhile, or was, whatever number of nodes was wanted: in
        a group of who is left they can finish their step and save. Nobody joins any more.
        """
        if self._has_ended or self._is_stopping:
            return
        self._is_stopping = True
        for rank in self._in_state("ready", "starting"):
            self._kill(rank)

    def decide(self, timestamp: float) -> list[Action]:
        """What is to be done now; nothing is said twice."""
        if not self._has_ended:
            self._classify_failures(timestamp)
        if not self._has_ended and not self._in_state("in"):
            self._end_if_no_survivor()
        if not self._has_ended:
            self._end_ranks(timestamp)
            self._retry_interrupted(timestamp)
            self._restore_hosts()
            self._start_regroup(timestamp)
            self._stop_if_abandoned(timestamp)
            self._start_newcomers(timestamp)
            self._admit_newcomers(timestamp)
        actions, self._actions = self._actions, []
        return actions

    def _classify_failures(self, timestamp: float) -> None:
        """Who failed because another was lost is lost, too; else it is the program's own doing."""
        if self._is_stopping:  # whose fault it is does not matter any more
            self._attribute_to_loss(self._unexplained, timestamp)
        if self._losses:
            self._attribute_to_loss(
                [pending for pending in self._unexplained if pending.failure.is_secondary],
                timestamp,
            )
        is_unanimous = {pending.slot for pending in self._unexplained} >= set(self._survivors)
        expired = [
            pending
            for pending in self._unexplained
            if is_unanimous or timestamp >= pending.deadline
        ]
        if not expired:
            return
        first = min(
            expired, key=lambda pending: (pending.failure.is_secondary, pending.failure.time)
        ).failure
        step = self._step if self._step >= 0 else None
        verdict = None if is_unanimous else self._policy.judge_failure(first, timestamp, step=step)
        if verdict is not None and verdict.again:
            self._attribute_to_loss(expired, timestamp)
        else:
            reason = "" if verdict is None else verdict.reason
            self._fail(*(pending.failure for pending in expired), reason=reason)

    def _attribute_to_loss(self, failures: Sequence[UnexplainedFailure], timestamp: float) -> None:
        self._unexplained = [failed for failed in self._unexplained if failed not in failures]
        for failed in failures:
            if self._ranks[failed.slot].session_closed and not (
                self._is_stopping or self._has_ended
            ):
                self._fail(failed.failure)
            else:
                self._drop(self._ranks[failed.slot], failed.failure, timestamp)

    def _end_if_no_survivor(self) -> None:
        """Nobody has the state any more: in order, or lost."""
        if self.is_finished:
            self._has_ended = True
        elif self._losses:
            self._fail(*self._losses)
        if self.is_finished or (self._has_ended and self._is_stopping):
            for host in self._hosts:
                newcomers = tuple(s.number for s in self._in_state("joining", "ready", "starting")
                             if s.host == host)  # fmt: skip
                if newcomers:
                    self._actions.append(Kill(host, newcomers))

    def _end_ranks(self, timestamp: float) -> None:
        """Kills who stands still, where the others go on without it, and who does not end.

        Also once more, where the order has not come through: nobody starts in its place before.
        """
        if self._is_stopping:
            self._stop_started_at = self._stop_started_at or timestamp
            if (
                timestamp >= self._stop_started_at + STATE_TRANSFER_S
            ):  # a large state, or a slow line
                for rank in self._in_state("joining"):
                    if not rank.killed:
                        self._kill(rank)
        trains = self._in_state("in")
        moving = [rank for rank in trains if not rank.frozen]
        # Their state is out of reach: better to go on from a checkpoint than to wait for them.
        is_deadlocked = bool(trains) and all(rank.hung for rank in trains)
        self._deadlocked_at = (self._deadlocked_at or timestamp) if is_deadlocked else None
        is_timed_out = (
            self._deadlocked_at is not None
            and timestamp >= self._deadlocked_at + DEADLOCK_TIMEOUT_S
        )
        # Where others were lost, and wait for who stands still, no user has paused the job.
        is_blocking_newcomers = bool(self._in_state("ready"))
        for rank in self._ranks.values():
            is_overdue = rank.kill_at is not None and timestamp >= rank.kill_at
            is_expendable = bool(moving) or (
                (is_blocking_newcomers or is_timed_out) and bool(rank.hung)
            )
            replaceable = self.can_recover and not (rank.killed or rank.session_closed)
            frozen = rank.frozen and is_expendable and replaceable
            if rank.killed and rank.killed_at is None:
                rank.killed_at = timestamp
            lives_on = rank.killed_at is not None and timestamp >= rank.killed_at + KILL_RETRY_S
            if rank.alive and (is_overdue or frozen or lives_on):
                self._kill(rank)
            if is_overdue:
                rank.kill_at = None

    def _restore_hosts(self) -> None:
        if self._is_stopping:
            return
        for host, node in self._hosts.items():
            if not node.ordered and node.state in ("no server", "lost"):
                node.ordered = True
                no_server = node.state == "no server"
                self._actions.append(Prepare(host) if no_server else Dial(host, node.pause_s))

    def _start_regroup(self, timestamp: float) -> None:
        """A generation that lost members, or holds, is followed by one that trains on."""
        unsettled = bool(self._generation.regrouping)
        broken = self._broken_at is not None or (self._store_is_lost and unsettled)
        if not broken and not (self._generation.is_paused and self.is_stable):
            return
        if broken:
            for rank in self._in_state("joining"):  # whether it has the state is not known
                self._kill(rank)
                self._schedule_restart(rank)
        available = [
            host for host, node in self._hosts.items() if node.state in ("up", "no server")
        ]
        if (
            len(available) < self._min_hosts
            and self._abandon_reason is None
            and not self._is_stopping
        ):
            self._wait_for_hosts(timestamp, available)
            if self._abandon_reason is None:
                if broken and self._can_share_state:
                    self._form_group(self._survivors, timestamp, planned=False)
                return
        self._wait_started_at = None
        if self._survivors:
            self._form_group(self._survivors, timestamp, planned=False)
        else:  # the others' training is over: nobody does what is left to do of this one's
            self._fail(*self._losses)

    @property
    def _can_share_state(self) -> bool:
        """Whether a rank was lost whose host is there: another is to have the state, too."""
        up = {host for host, node in self._hosts.items() if node.state == "up"}
        lost = any(rank.host in up for rank in self._in_state("lost"))
        return lost and bool(self._survivors) and not self._is_training_complete

    def _wait_for_hosts(self, timestamp: float, available: Sequence[str]) -> None:
        if self._wait_started_at is None:
            self._wait_started_at = timestamp
            if self.accepts_newcomers:
                self._actions.append(
                    Wait(tuple(host for host in self._hosts if host not in available))
                )
        is_host_returning = any(node.state == "lost" for node in self._hosts.values())
        is_hopeless = not (self.accepts_newcomers and is_host_returning)
        if is_hopeless or timestamp - self._wait_started_at >= self._patience_s:
            losses = [node.loss for node in self._hosts.values() if node.loss is not None]
            self._abandon_reason = min(losses or self._losses, key=lambda failure: failure.time)

    def _form_group(self, members: tuple[int, ...], timestamp: float, *, planned: bool) -> None:
        host = self._choose_store_host(members) if self._store_is_lost else ""
        if host:
            self._store_host, self._store_is_lost = host, False
        number = self._generation.number + 1
        former, is_paused = self._generation, self._wait_started_at is not None
        if not (former.regrouping or former.is_paused):  # it had trained
            self._progress_before_break = self._progress_at
        self._generation = Generation(number, members, timestamp, planned, is_paused, set(members),
                                       set(members))  # fmt: skip
        self._broken_at = None
        for slot in members:
            self._ranks[slot].interrupted_at = None
        self._actions.append(Regroup(number, members, planned, host, is_paused))

    def _choose_store_host(self, members: Sequence[int]) -> str:
        """A host that can hold it: its fork server is up."""
        hosts = [self._ranks[slot].host for slot in members]
        return next((h for h in hosts if self._hosts[h].state == "up"), hosts[0])

    def _stop_if_abandoned(self, timestamp: float) -> None:
        loss = None if self._is_stopping else self._abandon_reason
        if loss is not None and (
            self.is_stable or timestamp - self._generation.formed_at > STOP_TIMEOUT_S
        ):
            self._actions.append(Stop(loss))
            self._has_ended = True

    def _retry_interrupted(self, timestamp: float) -> None:
        """Ranks were interrupted, or do not meet, although nobody is lost.

        They try once more together. Where that is in vain, and they do not hear each other, one
        of those hosts is left out; where it is for another reason, it is the end.
        """
        is_abandoned = self._abandon_reason is not None and not self._is_stopping
        if self._broken_at is not None or is_abandoned:
            return
        if self._is_stopping and not self.is_stable:
            return
        newcomers = self._in_state("joining")
        is_timed_out = not self.is_stable and self._is_connect_timed_out(timestamp)
        if is_timed_out and self._exclude_unreachable(timestamp):
            return
        interrupted_at = [rank.interrupted_at for rank in self._in_state("in")
                  if rank.interrupted_at is not None]  # fmt: skip
        if (
            not interrupted_at
            or timestamp - min(interrupted_at) < INTERRUPT_TIMEOUT_S
            or self._unexplained
        ):
            return
        is_group_intact = self._is_stopping or not self._in_state("done")
        has_retried = bool(newcomers) or self._retried_step >= self._step or not is_group_intact
        joining_hosts = self._joining_hosts
        excluded = self._host_to_exclude(joining_hosts) if has_retried and is_group_intact else None
        if excluded is not None and (not newcomers or excluded[0] in joining_hosts):
            self._exclude_unreachable(timestamp)
        elif newcomers or not has_retried:
            for rank in newcomers:
                self._kill(rank)
                self._drop(rank, None, timestamp)
            self._retried_step = self._step
            self._form_group(self._survivors, timestamp, planned=False)
        else:
            self._actions.append(End("no rank was lost"))
            for rank in self._in_state("in"):
                rank.interrupted_at = None

    @property
    def _joining_hosts(self) -> set[str]:
        """From which ranks join, and which have none that trains."""
        trains = {rank.host for rank in self._in_state("in")}
        return {rank.host for rank in self._in_state("joining")} - trains

    def _is_connect_timed_out(self, timestamp: float) -> bool:
        """Whether connections of a new group are waited for in vain: gloo may wait for minutes."""
        gathered_at = self._generation.gathered_at
        is_overdue = gathered_at is not None and timestamp - gathered_at >= CONNECT_TIMEOUT_S
        return is_overdue and self._is_connecting and not self._in_state("done")

    def _exclude_unreachable(self, timestamp: float) -> bool:
        """Leaves out hosts until the others hear each other, as far as is known; whether any."""
        num_excluded = self._exclusions.total()
        unformed = [self._ranks[slot].host for slot in self._generation.members
                    if slot in self._generation.connecting]  # fmt: skip
        for host in sorted(self._joining_hosts & {*unformed}):  # whose line nobody knew
            peers = [name for name in dict.fromkeys(unformed) if name not in self._joining_hosts]
            if peers and not self._is_explained(host):
                self._exclude_host(host, peers, timestamp)
        self._exclude_blocked(timestamp)
        return self._exclusions.total() > num_excluded

    def _exclude_blocked(self, timestamp: float) -> bool:
        """Leaves out one host of each pair that is known to be silent; whether there was any."""
        num_excluded = self._exclusions.total()
        while (excluded := self._host_to_exclude(self._joining_hosts)) is not None:
            self._exclude_host(*excluded, timestamp)
        return self._exclusions.total() > num_excluded

    def _is_explained(self, host: str) -> bool:
        """Whether an error has said whom this host does not hear."""
        return any(host in pair and step >= self._step - 1
                   for pair, step in self._blocked_pairs.items())  # fmt: skip

    def _host_to_exclude(self, joining_hosts: set[str]) -> tuple[str, tuple[str, ...]] | None:
        """A host to go on without, and those of which it hears nothing; ``None``: there is none.

        A newcomer before who has the training's state, then who is at odds with most others, then
        whoever is not the host of the rank that saves.
        """
        order = [self._ranks[slot].host for slot in self._generation.members
                 if self._ranks[slot].state in ("in", "joining")]  # fmt: skip
        pairs = [pair for pair, step in self._blocked_pairs.items()
                 if step >= self._step - 1 and pair <= {*order}]  # fmt: skip
        if not pairs:
            return None
        count = Counter(host for pair in pairs for host in pair)
        excluded = max(count, key=lambda host: (host in joining_hosts, count[host], host != order[0],
                                            order.index(host)))  # fmt: skip
        peers = {host for pair in pairs if excluded in pair for host in pair} - {excluded}
        return excluded, tuple(sorted(peers, key=order.index))

    def _exclude_host(self, host: str, peers: Sequence[str], timestamp: float) -> None:
        """A host counts as lost, and comes back as lost ones do, but not at once."""
        if len(peers) == 1:
            headline = f"{host} and {peers[0]} do not hear each other"
        else:
            headline = f"{host} and others ({', '.join(peers)}) do not hear each other"
        lost_at = timestamp if self._blocked_at is None else self._blocked_at
        pause_s = min(MAX_EXCLUSION_S, EXCLUSION_S * 2 ** self._exclusions[host])
        self._exclusions[host] += 1
        self._actions.append(ExcludeHost(host, headline, pause_s))
        self.node_lost(host, Failure("lost", host, None, lost_at, headline=headline), timestamp)
        self._hosts[host].pause_s = pause_s

    def _start_newcomers(self, timestamp: float) -> None:
        """Newcomers for what is lost, where their host can start them."""
        is_ending = (
            self._has_ended
            or self._is_stopping
            or self._abandon_reason
            or self._is_training_complete
        )
        if is_ending or self._broken_at is not None:
            return
        if not self.accepts_newcomers:
            self._abandon_lost_ranks()
            return
        for host, node in self._hosts.items():
            lost = [
                rank
                for rank in self._in_state("lost")
                if rank.host == host and not rank.alive and rank.joined_at is None
            ]  # else the others say whether it made a step
            for rank in lost:
                if self._policy.newcomer_delay_s(rank.failed_starts) is None:
                    rank.state = "left out"
                    self._actions.append(RankAbandoned(rank.number, rank.loss))
            startable = [
                rank for rank in lost if rank.state == "lost" and timestamp >= rank.next_try
            ]
            if startable and node.state == "up":
                if self._store_is_lost and self.is_stable:
                    self._form_group(self._survivors, timestamp, planned=True)
                for rank in startable:
                    rank.state, rank.alive, rank.kill_at = "starting", True, None
                    rank.started_at = timestamp
                    rank.killed, rank.killed_at = False, None
                self._actions.append(Start(host, tuple(rank.number for rank in startable)))

    def _abandon_lost_ranks(self) -> None:
        """Nobody can join: what is lost stays lost, which is told once the others train on."""
        lost = self._in_state("lost")
        if not lost or not self.is_stable:
            return
        for rank in lost:
            rank.state = "left out"
        self._actions.append(
            RanksNotReplaced(tuple(rank.number for rank in lost), self._closed_reason)
        )

    def _admit_newcomers(self, timestamp: float) -> None:
        """Newcomers that are ready join; those that are nearly ready are waited for, a little."""
        ready = self._in_state("ready")
        is_ending = self._has_ended or self._is_stopping or self._is_training_complete
        if is_ending or not ready or not self.is_stable:
            return  # alone they would train all of it anew
        first = min(rank.ready_at for rank in ready)
        if self._in_state("starting") and timestamp - first < JOIN_WINDOW_S:
            return
        for rank in ready:
            rank.state = "joining"
        joining = tuple(rank.number for rank in ready)
        self._form_group(self._survivors + joining, timestamp, planned=True)
