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
    Generation,
    Held,
    Host,
    Joined,
    Kill,
    LeftOut,
    NotAgain,
    Prepare,
    Rank,
    RankStates,
    Recovered,
    Regroup,
    SendAway,
    Start,
    Stop,
    Wait,
)
from paceline.spec.failure import NEWCOMER_DIVERGED, NEWCOMER_MISMATCH, Failure

ANSWER_S = 3.0  # how long a rank that was interrupted waits until somebody is known to be lost
OWN_S = 0.5  # a failure of the program's own waits so long for the same on other ranks
LEAVING_S = 1.0  # a rank that has failed may take so long to end
SAVED = 143  # the exit status of a rank that was asked to stop, and has saved
TOO_SOON = "it ended with status 0 before it had joined"
STOPPED = "Stopped:"  # so begins what it raises
# A child of a rank, ended from outside: the system's choice where memory is short
WORKER_KILLED = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: (Killed|Terminated)")
TOGETHER_S = 1.0  # newcomers that are ready wait so long for others that are about to be
KILL_AGAIN_S = 5.0  # after which a rank that was to be ended and lives is ended once more
LAST_S = 10.0  # all that have the training's state hang for so long: they are ended, too
JOINS_S = 1.0  # in which who joins may still get the state when the ranks are asked to stop
STOP_S = 10.0  # for the last regrouping, before ranks are asked to stop in any case
MEET_S = 15.0  # for connections of a new group, once all its ranks are there
APART_S = 30.0  # to which a host that was sent away is dialled later, twice as long each time
LONGEST_APART_S = 600.0


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
        trains = {rank.number: rank.came for rank in self._in_state("in")}
        first = {slot for slot, came in trains.items() if came == min(trains.values())}
        theirs = next((side for side in sides if first <= {*side}), None)
        if theirs is None or self._is_stopping:
            return False
        strays = [slot for slot in trains if slot not in theirs]
        for slot in strays:
            self.set_hung(slot, headline)
        if strays:
            self._close(NEWCOMER_DIVERGED)
        return bool(strays)

    def retry_group(self, now: float) -> bool:
        """All ranks wait for each other in one collective, for too long.

        Returns:
            Whether they do it again in a new group: once at a step, and while all are there.
        """
        gone = self._in_state("done") or self._in_state("joining")
        gives_up = self._give_up_reason is not None
        if gone or self._retried_step >= self._step or not self.is_settled or gives_up:
            return False
        for rank in self._in_state("in"):
            rank.interrupted_at = now - ANSWER_S
        return True

    def separate(self, pairs: Sequence[tuple[str, str]], since: float, now: float) -> bool:
        """Hosts do not hear each other, which is certain: nobody tries to meet once more.

        Args:
            pairs: Two hosts each.
            since: When the ranks gave their last sign.
            now: The time.

        Returns:
            Whether the others go on without one host of each pair.
        """
        meets = self._is_connecting and not self._is_stopping
        if self._broken_at is not None or not (self.is_settled or meets) or self._held:
            return False
        if self._is_over or self._give_up_reason is not None or self._in_state("done"):
            return False
        # not the pairs that errors suggested
        self._silent_pairs = {frozenset(pair): self._step for pair in pairs}
        self._silent_since = since
        return self._leave_out_silent(now)

    def stop(self) -> None:
        """The ranks are asked to save and stop.

        They go on without what is lost meanwhile, or was, whatever number of nodes was wanted: in
        a group of who is left they can finish their step and save. Nobody joins any more.
        """
        if self._is_over or self._is_stopping:
            return
        self._is_stopping = True
        for rank in self._in_state("ready", "starting"):
            self._kill(rank)

    def decide(self, now: float) -> list[Action]:
        """What is to be done now; nothing is said twice."""
        if not self._is_over:
            self._judge_failures(now)
        if not self._is_over and not self._in_state("in"):
            self._end_without_survivors()
        if not self._is_over:
            self._end_ranks(now)
            self._retry_interrupted(now)
            self._restore_hosts()
            self._start_regroup(now)
            self._give_up(now)
            self._start_newcomers(now)
            self._admit_newcomers(now)
        actions, self._actions = self._actions, []
        return actions

    def _judge_failures(self, now: float) -> None:
        """Who failed because another was lost is lost, too; else it is the program's own doing."""
        if self._is_stopping:  # whose fault it is does not matter any more
            self._release(self._held, now)
        if self._losses:
            self._release([held for held in self._held if held.failure.is_secondary], now)
        all_of_them = {held.slot for held in self._held} >= set(self._survivors)
        due = [held for held in self._held if all_of_them or now >= held.until]
        if not due:
            return
        first = min(due, key=lambda held: (held.failure.is_secondary, held.failure.time)).failure
        step = self._step if self._step >= 0 else None
        verdict = None if all_of_them else self._policy.after_failure(first, now, step=step)
        if verdict is not None and verdict.again:
            self._release(due, now)
        else:
            why = "" if verdict is None else verdict.why
            self._fail(*(held.failure for held in due), why=why)

    def _release(self, held: Sequence[Held], now: float) -> None:
        self._held = [item for item in self._held if item not in held]
        for item in held:
            if self._ranks[item.slot].session_closed and not (self._is_stopping or self._is_over):
                self._fail(item.failure)
            else:
                self._drop(self._ranks[item.slot], item.failure, now)

    def _end_without_survivors(self) -> None:
        """Nobody has the state any more: in order, or lost."""
        if self.is_finished:
            self._is_over = True
        elif self._losses:
            self._fail(*self._losses)
        if self.is_finished or (self._is_over and self._is_stopping):
            for host in self._hosts:
                left = tuple(s.number for s in self._in_state("joining", "ready", "starting")
                             if s.host == host)  # fmt: skip
                if left:
                    self._actions.append(Kill(host, left))

    def _end_ranks(self, now: float) -> None:
        """Kills who stands still, where the others go on without it, and who does not end.

        Also once more, where the order has not come through: nobody starts in its place before.
        """
        if self._is_stopping:
            self._stopping_since = self._stopping_since or now
            if now >= self._stopping_since + JOINS_S:  # a large state, or a slow line
                for rank in self._in_state("joining"):
                    if not rank.killed:
                        self._kill(rank)
        trains = self._in_state("in")
        moving = [rank for rank in trains if not rank.frozen]
        # Their state is out of reach: better to go on from a checkpoint than to wait for them.
        all_hang = bool(trains) and all(rank.hung for rank in trains)
        self._all_hung_since = (self._all_hung_since or now) if all_hang else None
        given_up = self._all_hung_since is not None and now >= self._all_hung_since + LAST_S
        # Where others were lost, and wait for who stands still, no user has paused the job.
        waited = bool(self._in_state("ready"))
        for rank in self._ranks.values():
            late = rank.kill_at is not None and now >= rank.kill_at
            over = bool(moving) or ((waited or given_up) and bool(rank.hung))
            replaceable = self.can_recover and not (rank.killed or rank.session_closed)
            frozen = rank.frozen and over and replaceable
            if rank.killed and rank.killed_at is None:
                rank.killed_at = now
            lives_on = rank.killed_at is not None and now >= rank.killed_at + KILL_AGAIN_S
            if rank.alive and (late or frozen or lives_on):
                self._kill(rank)
            if late:
                rank.kill_at = None

    def _restore_hosts(self) -> None:
        if self._is_stopping:
            return
        for host, node in self._hosts.items():
            if not node.ordered and node.state in ("no server", "lost"):
                node.ordered = True
                no_server = node.state == "no server"
                self._actions.append(Prepare(host) if no_server else Dial(host, node.pause_s))

    def _start_regroup(self, now: float) -> None:
        """A generation that lost members, or holds, is followed by one that trains on."""
        unsettled = bool(self._generation.unsettled)
        broken = self._broken_at is not None or (self._store_is_lost and unsettled)
        if not broken and not (self._generation.holds and self.is_settled):
            return
        if broken:
            for rank in self._in_state("joining"):  # whether it has the state is not known
                self._kill(rank)
                self._restart_later(rank)
        there = [host for host, node in self._hosts.items() if node.state in ("up", "no server")]
        if len(there) < self._min_hosts and self._give_up_reason is None and not self._is_stopping:
            self._wait_for_hosts(now, there)
            if self._give_up_reason is None:
                if broken and self._can_share_state:
                    self._form_group(self._survivors, now, planned=False)
                return
        self._waiting_since = None
        if self._survivors:
            self._form_group(self._survivors, now, planned=False)
        else:  # the others' training is over: nobody does what is left to do of this one's
            self._fail(*self._losses)

    @property
    def _can_share_state(self) -> bool:
        """Whether a rank was lost whose host is there: another is to have the state, too."""
        up = {host for host, node in self._hosts.items() if node.state == "up"}
        lost = any(rank.host in up for rank in self._in_state("lost"))
        return lost and bool(self._survivors) and not self._training_is_over

    def _wait_for_hosts(self, now: float, there: Sequence[str]) -> None:
        if self._waiting_since is None:
            self._waiting_since = now
            if self.accepts_newcomers:
                self._actions.append(Wait(tuple(host for host in self._hosts if host not in there)))
        away_for_now = any(node.state == "lost" for node in self._hosts.values())
        nobody_comes = not (self.accepts_newcomers and away_for_now)
        if nobody_comes or now - self._waiting_since >= self._patience_s:
            away = [node.why for node in self._hosts.values() if node.why is not None]
            self._give_up_reason = min(away or self._losses, key=lambda failure: failure.time)

    def _form_group(self, members: tuple[int, ...], now: float, *, planned: bool) -> None:
        host = self._new_store_host(members) if self._store_is_lost else ""
        if host:
            self._store_host, self._store_is_lost = host, False
        number = self._generation.number + 1
        former, holds = self._generation, self._waiting_since is not None
        if not (former.unsettled or former.holds):  # it had trained
            self._last_progress_at = self._progress_at
        self._generation = Generation(number, members, now, planned, holds, set(members),
                                       set(members))  # fmt: skip
        self._broken_at = None
        for slot in members:
            self._ranks[slot].interrupted_at = None
        self._actions.append(Regroup(number, members, planned, host, holds))

    def _new_store_host(self, members: Sequence[int]) -> str:
        """A host that can hold it: its fork server is up."""
        hosts = [self._ranks[slot].host for slot in members]
        return next((h for h in hosts if self._hosts[h].state == "up"), hosts[0])

    def _give_up(self, now: float) -> None:
        why = None if self._is_stopping else self._give_up_reason
        if why is not None and (self.is_settled or now - self._generation.begun > STOP_S):
            self._actions.append(Stop(why))
            self._is_over = True

    def _retry_interrupted(self, now: float) -> None:
        """Ranks were interrupted, or do not meet, although nobody is lost.

        They try once more together. Where that is in vain, and they do not hear each other, one
        of those hosts is left out; where it is for another reason, it is the end.
        """
        gives_up = self._give_up_reason is not None and not self._is_stopping
        if self._broken_at is not None or gives_up:
            return
        if self._is_stopping and not self.is_settled:
            return
        newcomers = self._in_state("joining")
        too_long = not self.is_settled and self._connects_too_long(now)
        if too_long and self._leave_out_unreachable(now):
            return
        asking = [rank.interrupted_at for rank in self._in_state("in")
                  if rank.interrupted_at is not None]  # fmt: skip
        if not asking or now - min(asking) < ANSWER_S or self._held:
            return
        alone = self._is_stopping or not self._in_state("done")
        tried = bool(newcomers) or self._retried_step >= self._step or not alone
        new_hosts = self._new_hosts
        apart = self._host_to_leave_out(new_hosts) if tried and alone else None
        if apart is not None and (not newcomers or apart[0] in new_hosts):
            self._leave_out_unreachable(now)
        elif newcomers or not tried:
            for rank in newcomers:
                self._kill(rank)
                self._drop(rank, None, now)
            self._retried_step = self._step
            self._form_group(self._survivors, now, planned=False)
        else:
            self._actions.append(End("no rank was lost"))
            for rank in self._in_state("in"):
                rank.interrupted_at = None

    @property
    def _new_hosts(self) -> set[str]:
        """From which ranks join, and which have none that trains."""
        trains = {rank.host for rank in self._in_state("in")}
        return {rank.host for rank in self._in_state("joining")} - trains

    def _connects_too_long(self, now: float) -> bool:
        """Whether connections of a new group are waited for in vain: gloo may wait for minutes."""
        since = self._generation.met_at
        late = since is not None and now - since >= MEET_S
        return late and self._is_connecting and not self._in_state("done")

    def _leave_out_unreachable(self, now: float) -> bool:
        """Leaves out hosts until the others hear each other, as far as is known; whether any."""
        before = self._times_left_out.total()
        unformed = [self._ranks[slot].host for slot in self._generation.members
                    if slot in self._generation.unformed]  # fmt: skip
        for host in sorted(self._new_hosts & {*unformed}):  # whose line nobody knew
            others = [name for name in dict.fromkeys(unformed) if name not in self._new_hosts]
            if others and not self._is_explained(host):
                self._send_host_away(host, others, now)
        self._leave_out_silent(now)
        return self._times_left_out.total() > before

    def _leave_out_silent(self, now: float) -> bool:
        """Leaves out one host of each pair that is known to be silent; whether there was any."""
        before = self._times_left_out.total()
        while (apart := self._host_to_leave_out(self._new_hosts)) is not None:
            self._send_host_away(*apart, now)
        return self._times_left_out.total() > before

    def _is_explained(self, host: str) -> bool:
        """Whether an error has said whom this host does not hear."""
        return any(host in pair and step >= self._step - 1
                   for pair, step in self._silent_pairs.items())  # fmt: skip

    def _host_to_leave_out(self, new_hosts: set[str]) -> tuple[str, tuple[str, ...]] | None:
        """A host to go on without, and those of which it hears nothing; ``None``: there is none.

        A newcomer before who has the training's state, then who is at odds with most others, then
        whoever is not the host of the rank that saves.
        """
        order = [self._ranks[slot].host for slot in self._generation.members
                 if self._ranks[slot].state in ("in", "joining")]  # fmt: skip
        pairs = [pair for pair, step in self._silent_pairs.items()
                 if step >= self._step - 1 and pair <= {*order}]  # fmt: skip
        if not pairs:
            return None
        count = Counter(host for pair in pairs for host in pair)
        gone = max(count, key=lambda host: (host in new_hosts, count[host], host != order[0],
                                            order.index(host)))  # fmt: skip
        others = {host for pair in pairs if gone in pair for host in pair} - {gone}
        return gone, tuple(sorted(others, key=order.index))

    def _send_host_away(self, host: str, others: Sequence[str], now: float) -> None:
        """A host counts as lost, and comes back as lost ones do, but not at once."""
        if len(others) == 1:
            headline = f"{host} and {others[0]} do not hear each other"
        else:
            headline = f"{host} and others ({', '.join(others)}) do not hear each other"
        began = now if self._silent_since is None else self._silent_since
        pause_s = min(LONGEST_APART_S, APART_S * 2 ** self._times_left_out[host])
        self._times_left_out[host] += 1
        self._actions.append(SendAway(host, headline, pause_s))
        self.node_lost(host, Failure("lost", host, None, began, headline=headline), now)
        self._hosts[host].pause_s = pause_s

    def _start_newcomers(self, now: float) -> None:
        """Newcomers for what is lost, where their host can start them."""
        ends = self._is_over or self._is_stopping or self._give_up_reason or self._training_is_over
        if ends or self._broken_at is not None:
            return
        if not self.accepts_newcomers:
            self._leave_out_lost()
            return
        for host, node in self._hosts.items():
            lost = [
                rank
                for rank in self._in_state("lost")
                if rank.host == host and not rank.alive and rank.joined_at is None
            ]  # else the others say whether it made a step
            for rank in lost:
                if self._policy.newcomer_delay_s(rank.tries) is None:
                    rank.state = "left out"
                    self._actions.append(LeftOut(rank.number, rank.last))
            due = [rank for rank in lost if rank.state == "lost" and now >= rank.next_try]
            if due and node.state == "up":
                if self._store_is_lost and self.is_settled:
                    self._form_group(self._survivors, now, planned=True)
                for rank in due:
                    rank.state, rank.alive, rank.kill_at = "starting", True, None
                    rank.started_at = now
                    rank.killed, rank.killed_at = False, None
                self._actions.append(Start(host, tuple(rank.number for rank in due)))

    def _leave_out_lost(self) -> None:
        """Nobody can join: what is lost stays lost, which is told once the others train on."""
        lost = self._in_state("lost")
        if not lost or not self.is_settled:
            return
        for rank in lost:
            rank.state = "left out"
        self._actions.append(NotAgain(tuple(rank.number for rank in lost), self._closed_reason))

    def _admit_newcomers(self, now: float) -> None:
        """Newcomers that are ready join; those that are nearly ready are waited for, a little."""
        ready = self._in_state("ready")
        ends = self._is_over or self._is_stopping or self._training_is_over
        if ends or not ready or not self.is_settled:
            return  # alone they would train all of it anew
        first = min(rank.ready_at for rank in ready)
        if self._in_state("starting") and now - first < TOGETHER_S:
            return
        for rank in ready:
            rank.state = "joining"
        joining = tuple(rank.number for rank in ready)
        self._form_group(self._survivors + joining, now, planned=True)
