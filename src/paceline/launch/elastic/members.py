"""Decides which ranks train together, and what follows when some are lost or come back. Pure.

A group that lost a member is formed anew without it at once. A rank that is started in its place
joins between two steps, once it is ready.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from paceline.launch.elastic.rank_events import INTERRUPT_TIMEOUT_S, RankEvents
from paceline.launch.elastic.rank_states import (
    Action,
    Dial,
    End,
    ExcludeHost,
    Generation,
    Kill,
    Prepare,
    Rank,
    RankAbandoned,
    RanksNotReplaced,
    Regroup,
    Start,
    Stop,
    UnexplainedFailure,
    Wait,
)
from paceline.spec.failure import NEWCOMER_DIVERGED, UNFREED, Failure

JOIN_WINDOW_S = 1.0  # for ready newcomers to wait for others that are starting
KILL_RETRY_S = 5.0  # before a rank that survived a kill is killed again
DEADLOCK_TIMEOUT_S = 10.0  # before all ranks with the training's state are ended if all hang
STATE_TRANSFER_S = 1.0  # for joining ranks to get the state once the job is asked to stop
STOP_TIMEOUT_S = 10.0  # for the last regrouping, before ranks are asked to stop in any case
CONNECT_TIMEOUT_S = 15.0  # for the connections of a new group, once all its ranks are there
EXCLUSION_S = 30.0  # before an excluded host is dialled again; doubles each time
MAX_EXCLUSION_S = 600.0


class Members(RankEvents):
    """Decides what is to be done about the ranks of one attempt."""

    def end_strays(self, sides: Sequence[Sequence[int]], headline: str) -> bool:
        """Ends newcomers that wait in another collective than the ranks that were there first.

        Such newcomers follow a loop of their own, so that no other newcomer joins either. ``sides``
        are slots that wait in the same collective. Returns whether the others go on.
        """
        joined = {rank.number: rank.joined_generation for rank in self._in_state("in")}
        first = {slot for slot, generation in joined.items() if generation == min(joined.values())}
        first_side = next((side for side in sides if first <= {*side}), None)
        if first_side is None or self.is_stopping:
            return False
        strays = [slot for slot in joined if slot not in first_side]
        for slot in strays:
            self.set_hung(slot, headline)
        if strays:
            self._close(NEWCOMER_DIVERGED)
        return bool(strays)

    def retry_group(self) -> bool:
        """Lets ranks that wait for each other retry in a new group, once per step; returns whether.

        Only while all of them are there.
        """
        departed = self._in_state("done", "joining")
        is_abandoned = self._abandon_reason is not None
        if departed or self._retried_step >= self._step or not self.is_stable or is_abandoned:
            return False
        for rank in self._in_state("in"):
            rank.interrupted_at = self._now - INTERRUPT_TIMEOUT_S
        return True

    def separate(self, pairs: Sequence[tuple[str, str]], progress_at: float) -> bool:
        """Excludes one host of each pair that cannot reach each other; returns whether it does."""
        is_connecting = self._is_connecting and not self.is_stopping
        if self._broken_at is not None or self._unexplained or self._in_state("done"):
            return False
        if self._has_ended or self._abandon_reason or not (self.is_stable or is_connecting):
            return False
        self._blocked_pairs = {frozenset(pair): self._step for pair in pairs}
        self._blocked_at = progress_at
        return self._exclude_blocked()

    def stop(self) -> None:
        """The ranks are asked to save and stop.

        No rank joins any more. After a loss the survivors still regroup, however few nodes are
        left, so that they can finish their step and save.
        """
        if self._has_ended or self.is_stopping:
            return
        self.is_stopping = True
        for rank in self._in_state("ready", "starting"):
            self._kill(rank)

    def decide(self) -> list[Action]:
        """Returns what is to be done now, each action once."""
        if not self._has_ended:
            self._classify_failures()
        if not self._has_ended and not self._in_state("in"):
            self._end_if_no_survivor()
        if not self._has_ended:
            self._end_ranks()
            self._retry_interrupted()
            self._restore_hosts()
            self._start_regroup()
            self._stop_if_abandoned()
            self._start_newcomers()
            self._admit_newcomers()
        actions, self._actions = self._actions, []
        return actions

    def _classify_failures(self) -> None:
        """Counts failures that followed a loss as losses; others are the program's own."""
        if self.is_stopping:  # the cause does not matter any more
            self._attribute_to_loss(self._unexplained)
        if self._losses:
            self._attribute_to_loss([p for p in self._unexplained if p.failure.is_secondary])
        is_unanimous = {pending.slot for pending in self._unexplained} >= set(self._survivors)
        expired = [p for p in self._unexplained if is_unanimous or self._now >= p.deadline]
        if not expired:
            return

        failures = [pending.failure for pending in expired]
        first = min(failures, key=lambda failure: (failure.is_secondary, failure.time))
        step = self._step if self._step >= 0 else None
        verdict = None if is_unanimous else self._policy.judge_failure(first, self._now, step=step)
        if verdict is not None and verdict.retries:
            self._attribute_to_loss(expired)
        else:
            self._fail(*failures, reason="" if verdict is None else verdict.reason)

    def _attribute_to_loss(self, failures: Sequence[UnexplainedFailure]) -> None:
        self._unexplained = [pending for pending in self._unexplained if pending not in failures]
        for pending in failures:
            rank = self._ranks[pending.slot]
            if rank.session_closed and not (self.is_stopping or self._has_ended):
                self._fail(pending.failure)
            else:
                self._drop(rank, pending.failure)

    def _end_if_no_survivor(self) -> None:
        """Ends the attempt because no rank has the state: all have ended or were lost."""
        if self.is_finished:
            self._has_ended = True
        elif self._losses:
            self._fail(*self._losses)
        if self.is_finished or (self._has_ended and self.is_stopping):
            for host in self._hosts:
                newcomers = tuple(r.number for r in self._in_state("joining", "ready", "starting")
                                  if r.host == host)  # fmt: skip
                if newcomers:
                    self._actions.append(Kill(host, newcomers))

    def _end_ranks(self) -> None:
        """Kills ranks that hang while the others can go on, and ranks that do not end.

        Kills again after some time, because no newcomer starts before the old process has ended.
        """
        self._end_unfreed()
        now = self._now
        if self.is_stopping:
            self._stop_started_at = self._stop_started_at or now
            if now >= self._stop_started_at + STATE_TRANSFER_S:  # a large state, or a slow link
                for rank in self._in_state("joining"):
                    if not rank.killed:
                        self._kill(rank)

        members = self._in_state("in")
        # Their state is out of reach: better to go on from a checkpoint than to wait for them.
        is_deadlocked = bool(members) and all(rank.hang_reason for rank in members)
        self._deadlocked_at = (self._deadlocked_at or now) if is_deadlocked else None
        is_timed_out = is_deadlocked and now >= (self._deadlocked_at or now) + DEADLOCK_TIMEOUT_S
        # If lost ranks have newcomers that wait for the hung one, no user has paused the job.
        ends_hung = is_timed_out or bool(self._in_state("ready"))
        ends_frozen = any(not rank.frozen for rank in members)
        for rank in self._ranks.values():
            is_overdue = rank.kill_at is not None and now >= rank.kill_at
            replaceable = self.can_recover and not (rank.killed or rank.session_closed)
            is_expendable = ends_frozen or (ends_hung and bool(rank.hang_reason))
            if rank.killed and rank.killed_at is None:
                rank.killed_at = now
            survived_kill = rank.killed_at is not None and now >= rank.killed_at + KILL_RETRY_S
            is_stuck = rank.frozen and is_expendable and replaceable
            if rank.alive and (is_overdue or is_stuck or survived_kill):
                self._kill(rank)
            if is_overdue:
                rank.kill_at = None

    def _end_unfreed(self) -> None:
        """Has ranks ended that connect to a former group and do not leave it in time.

        NCCL cannot be interrupted while it makes a communicator.
        """
        connecting = [rank for rank in self._in_state("in") if rank.connects_to is not None]
        unfreed = [rank for rank in connecting if not rank.killed and self._is_overdue(rank)]
        if not unfreed:
            return
        group = self._formers[unfreed[0].connects_to or 0]
        lost = [slot for slot in group.members if slot not in self._generation.members]
        cause = f"{_list_ranks(lost)} lost then" if lost else "the group changed then"
        not_freed = f"{_list_ranks([rank.number for rank in unfreed])} not freed"
        for rank in unfreed:
            rank.kill_at = self._now
            rank.hang_reason = f"{UNFREED}: {cause}; {not_freed}"

    def _is_overdue(self, rank: Rank) -> bool:
        """Whether a rank connects to a group although the next one was announced long ago."""
        assert rank.connects_to is not None
        later = [*self._formers, self._generation][rank.connects_to + 1 :]
        return bool(later) and self._now - later[0].formed_at >= CONNECT_TIMEOUT_S

    def _restore_hosts(self) -> None:
        if self.is_stopping:
            return
        for host, node in self._hosts.items():
            if not node.is_return_ordered and node.state in ("no server", "lost"):
                node.is_return_ordered = True
                restarts = node.state == "no server"
                self._actions.append(Prepare(host) if restarts else Dial(host, node.pause_s))

    def _start_regroup(self) -> None:
        """Forms the next generation if this one lost members or is paused."""
        unsettled = bool(self._generation.regrouping)
        broken = self._broken_at is not None or (self._store_is_lost and unsettled)
        if not broken and not (self._generation.is_paused and self.is_stable):
            return
        if broken:
            for rank in self._in_state("joining"):  # it may not have the state
                self._kill(rank)
                self._schedule_restart(rank)
        available = [name for name, h in self._hosts.items() if h.state in ("up", "no server")]
        too_few = len(available) < self._min_hosts
        if too_few and self._abandon_reason is None and not self.is_stopping:
            self._wait_for_hosts(available)
            if self._abandon_reason is None:
                if broken and self._can_share_state:
                    self._form_group(self._survivors, planned=False)
                return
        self._wait_started_at = None
        if self._survivors:
            self._form_group(self._survivors, planned=False)
        else:  # the training of the others is over: no rank can do the rest of the lost one's
            self._fail(*self._losses)

    @property
    def _can_share_state(self) -> bool:
        """Whether a newcomer on a lost rank's host can get the state while the ranks wait."""
        up = {host for host, node in self._hosts.items() if node.state == "up"}
        lost = any(rank.host in up for rank in self._in_state("lost"))
        return lost and bool(self._survivors) and not self._is_training_complete

    def _wait_for_hosts(self, available: Sequence[str]) -> None:
        if self._wait_started_at is None:
            self._wait_started_at = self._now
            if self.accepts_newcomers:
                missing = tuple(host for host in self._hosts if host not in available)
                self._actions.append(Wait(missing))
        is_host_returning = any(node.state == "lost" for node in self._hosts.values())
        is_hopeless = not (self.accepts_newcomers and is_host_returning)
        if is_hopeless or self._now - self._wait_started_at >= self._timeout_s:
            losses = [node.loss for node in self._hosts.values() if node.loss is not None]
            self._abandon_reason = min(losses or self._losses, key=lambda failure: failure.time)

    def _form_group(self, members: tuple[int, ...], *, planned: bool) -> None:
        host = ""
        if self._store_is_lost:  # the new one is on a host with a fork server, if there is any
            hosts = [self._ranks[slot].host for slot in members]
            host = next((h for h in hosts if self._hosts[h].state == "up"), hosts[0])
            self._store_host, self._store_is_lost = host, False
        number = self._generation.number + 1
        self._formers.append(self._generation)
        former, is_paused = self._generation, self._wait_started_at is not None
        if not (former.regrouping or former.is_paused):  # it had trained
            self._progress_before_break = self._progress_at
        self._generation = Generation(number, members, self._now, planned, is_paused, set(members),
                                       set(members))  # fmt: skip
        self._broken_at = None
        for slot in members:
            self._ranks[slot].interrupted_at = None
        self._actions.append(Regroup(number, members, planned, host, is_paused))

    def _stop_if_abandoned(self) -> None:
        loss = None if self.is_stopping else self._abandon_reason
        is_timed_out = self._now - self._generation.formed_at > STOP_TIMEOUT_S
        if loss is not None and (self.is_stable or is_timed_out):
            self._actions.append(Stop(loss))
            self._has_ended = True

    def _retry_interrupted(self) -> None:
        """Forms a new group if ranks were interrupted, or do not connect, without a loss.

        If that has failed before, one host of each pair that cannot reach each other is excluded;
        without such a pair the ranks end.
        """
        is_abandoned = self._abandon_reason is not None and not self.is_stopping
        is_forming = self.is_stopping and not self.is_stable
        if self._broken_at is not None or is_abandoned or is_forming:
            return
        newcomers = self._in_state("joining")
        is_timed_out = not self.is_stable and self._is_connect_timed_out()
        if is_timed_out and self._exclude_unreachable():
            return
        interrupted_at = min((rank.interrupted_at for rank in self._in_state("in")
                              if rank.interrupted_at is not None), default=math.inf)  # fmt: skip
        if self._unexplained or self._now - interrupted_at < INTERRUPT_TIMEOUT_S:
            return

        is_group_intact = self.is_stopping or not self._in_state("done")
        has_retried = bool(newcomers) or self._retried_step >= self._step or not is_group_intact
        joining_hosts = self._joining_hosts
        excluded = self._host_to_exclude(joining_hosts) if has_retried and is_group_intact else None
        if excluded is not None and (not newcomers or excluded[0] in joining_hosts):
            self._exclude_unreachable()
        elif newcomers or not has_retried:
            for rank in newcomers:
                self._kill(rank)
                self._drop(rank, None)
            self._retried_step = self._step
            self._form_group(self._survivors, planned=False)
        else:
            self._actions.append(End("no rank was lost"))
            for rank in self._in_state("in"):
                rank.interrupted_at = None

    @property
    def _joining_hosts(self) -> set[str]:
        """Hosts from which ranks join and on which none trains."""
        trains = {rank.host for rank in self._in_state("in")}
        return {rank.host for rank in self._in_state("joining")} - trains

    def _is_connect_timed_out(self) -> bool:
        """Whether a new group does not connect in time; gloo itself may wait for minutes."""
        gathered_at = self._generation.gathered_at
        is_overdue = gathered_at is not None and self._now - gathered_at >= CONNECT_TIMEOUT_S
        return is_overdue and self._is_connecting and not self._in_state("done")

    def _exclude_unreachable(self) -> bool:
        """Excludes hosts until all known blocked pairs are gone; returns whether it did."""
        num_excluded = self._exclusions.total()
        unformed = [self._ranks[slot].host for slot in self._generation.members
                    if slot in self._generation.connecting]  # fmt: skip
        for host in sorted(self._joining_hosts & {*unformed}):  # on untested links
            peers = [name for name in dict.fromkeys(unformed) if name not in self._joining_hosts]
            if peers and not self._is_explained(host):
                self._exclude_host(host, peers)
        self._exclude_blocked()
        return self._exclusions.total() > num_excluded

    def _exclude_blocked(self) -> bool:
        """Excludes one host of each pair that is known to be blocked; returns whether it did."""
        num_excluded = self._exclusions.total()
        while (excluded := self._host_to_exclude(self._joining_hosts)) is not None:
            self._exclude_host(*excluded)
        return self._exclusions.total() > num_excluded

    def _is_explained(self, host: str) -> bool:
        """Whether a recent error has named a host that this one cannot reach."""
        return any(host in pair and step >= self._step - 1
                   for pair, step in self._blocked_pairs.items())  # fmt: skip

    def _host_to_exclude(self, joining_hosts: set[str]) -> tuple[str, tuple[str, ...]] | None:
        """Returns a host to exclude, and those that it cannot reach; ``None`` if there is none.

        Prefers newcomers to hosts with the training's state, then the host with most blocked
        pairs, then any but the host of the rank that saves.
        """
        order = [self._ranks[slot].host for slot in self._generation.members
                 if self._ranks[slot].state in ("in", "joining")]  # fmt: skip
        pairs = [pair for pair, step in self._blocked_pairs.items()
                 if step >= self._step - 1 and pair <= {*order}]  # fmt: skip
        if not pairs:
            return None
        count = Counter(host for pair in pairs for host in pair)
        excluded = max(count, key=lambda host: (host in joining_hosts, count[host],
                                                host != order[0], order.index(host)))  # fmt: skip
        peers = {host for pair in pairs if excluded in pair for host in pair} - {excluded}
        return excluded, tuple(sorted(peers, key=order.index))

    def _exclude_host(self, host: str, peers: Sequence[str]) -> None:
        """Counts a host as lost; it is dialled again after some time."""
        if len(peers) == 1:
            headline = f"{host} and {peers[0]} cannot reach each other"
        else:
            headline = f"{host} and others ({', '.join(peers)}) cannot reach each other"
        lost_at = self._now if self._blocked_at is None else self._blocked_at
        pause_s = min(MAX_EXCLUSION_S, EXCLUSION_S * 2 ** self._exclusions[host])
        self._exclusions[host] += 1
        self._actions.append(ExcludeHost(host, headline, pause_s))
        self.node_lost(host, Failure("lost", host, None, lost_at, headline=headline))
        self._hosts[host].pause_s = pause_s

    def _start_newcomers(self) -> None:
        """Starts newcomers for lost ranks on hosts that can start them."""
        is_ending = self._has_ended or self.is_stopping or self._is_training_complete
        if is_ending or self._abandon_reason is not None or self._broken_at is not None:
            return
        if not self.accepts_newcomers:
            self._abandon_lost_ranks()
            return
        for host, node in self._hosts.items():
            # A rank that had joined is restarted once the others report whether it made a step.
            lost = [
                rank
                for rank in self._in_state("lost")
                if rank.host == host and not rank.alive and rank.joined_step is None
            ]
            for rank in lost:
                if self._policy.newcomer_delay_s(rank.failed_starts) is None:
                    rank.state = "left out"
                    self._actions.append(RankAbandoned(rank.number, rank.loss))
            startable = [r for r in lost if r.state == "lost" and self._now >= r.restart_at]
            if startable and node.state == "up":
                if self._store_is_lost and self.is_stable:
                    self._form_group(self._survivors, planned=True)
                for rank in startable:
                    rank.state, rank.alive, rank.started_at = "starting", True, self._now
                    rank.killed, rank.kill_at, rank.killed_at = False, None, None
                self._actions.append(Start(host, tuple(rank.number for rank in startable)))

    def _abandon_lost_ranks(self) -> None:
        """Gives up lost ranks because no rank can join; reported once the others train on."""
        lost = self._in_state("lost")
        if not lost or not self.is_stable:
            return
        for rank in lost:
            rank.state = "left out"
        slots = tuple(rank.number for rank in lost)
        self._actions.append(RanksNotReplaced(slots, self._closed_reason))

    def _admit_newcomers(self) -> None:
        """Lets ready newcomers join; waits a little for others that are starting."""
        ready = self._in_state("ready")
        is_ending = self._has_ended or self.is_stopping or self._is_training_complete
        if is_ending or not ready or not self.is_stable:
            return
        first = min(rank.ready_at for rank in ready)
        if self._in_state("starting") and self._now - first < JOIN_WINDOW_S:
            return
        for rank in ready:
            rank.state = "joining"
        joining = tuple(rank.number for rank in ready)
        self._form_group(self._survivors + joining, planned=True)


def _list_ranks(slots: Sequence[int]) -> str:
    """Returns the subject of a sentence in the past passive."""
    numbers = ", ".join(map(str, slots))
    return f"rank {numbers} was" if len(slots) == 1 else f"ranks {numbers} were"
