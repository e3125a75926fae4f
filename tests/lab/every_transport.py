"""What has to hold of every transport: one class, mixed into the tests of each."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from captures import MARKS, captured, readable
from intruders import check_intruders
from launches import TIMEOUT_S, Ended, eventually
from transports import Transport, contents, largest_difference, reference, said_in_logs

# what a batch system adds to a run directory
BATCH_FILES = {"batch.json", "job.sbatch"}


class EveryTransport:
    """Takes the fixture ``transport`` of the module, which sees to it that nothing is left.

    Attributes:
        redials: A host whose agent is lost comes back.
    """

    redials = True

    def test_ranks_know_their_place(self, transport: Transport) -> None:
        """Ranks in the order of the hosts, with what a script that each host sources exports."""
        words = ("--no-torch", "-p", "2", "--activate", "activate.sh")
        ended = transport.run(*words, "tell.py", "a b", "$HOME;x'\"")
        assert ended.code == 0, ended.err
        places = [ended.said(rank)["place"] for rank in range(4)]
        assert [place["PACELINE_HOST"] for place in places] == ["n1", "n1", "n2", "n2"]
        assert [place["RANK"] for place in places] == ["0", "1", "2", "3"]
        arguments = [bytes.fromhex(word).decode() for word in ended.said(3)["argv"]]
        assert arguments == ["a b", "$HOME;x'\""]
        activated = [bytes.fromhex(ended.said(rank)["env"]["T_ACTIVATED"]) for rank in (1, 2)]
        assert activated == [b"by n1, it's sourced", b"by n2, it's sourced"]
        assert ended.json("result.json")["exit_code"] == 0

    def test_same_parameters_and_files_as_over_ssh(self, transport: Transport) -> None:
        found = transport.trains().directory
        assert largest_difference(found, reference(transport.site)) < 1e-10
        own = {name for name in contents(found) if not name.startswith("slurm-")} - BATCH_FILES
        assert own == contents(reference(transport.site))

    def test_a_rank_is_killed(self, transport: Transport) -> None:
        ended = transport.run("--no-torch", "-p", "1", "end.py", "kill", "1")
        assert ended.code == 128 + signal.SIGKILL, ended.err
        assert "rank 1 on n2: killed by SIGKILL" in both(ended), both(ended)

    def test_a_rank_that_others_go_on_without_comes_back(self, transport: Transport) -> None:
        """Where it can, with its agent."""
        lost = "orphan" if self.redials else "dies"
        ended = transport.run("--no-torch", "-p", "1", "member.py", "60", lost, "1")
        assert ended.code == 0, both(ended)
        (one,) = ended.json("result.json")["recoveries"]["of"]
        assert one["who"] == ["rank 1 on n2"]
        assert ("the agent was killed" in one["why"]) is self.redials
        assert "rank 1 on n2 is back after" in both(ended), both(ended)

    def test_what_encrypted_ranks_send_is_not_readable(self, transport: Transport) -> None:
        packets = transport.site.project.parent / "packets"
        with captured(transport.site, packets):
            ended = transport.run("--encrypt", "-p", "1", "marked.py", "30")
        assert ended.code == 0, both(ended)
        assert both(ended).count("weights as before") == 2
        assert readable(packets) == set()

    def test_strangers_and_other_users_get_nothing(self, transport: Transport) -> None:
        """Only those who see all packets can read what ranks send without encryption."""
        site, since = transport.site, time.time()
        packets = site.project.parent / "packets"
        with (
            captured(site, packets) as end_capture,
            transport.started("-p", "1", "marked.py", "100000") as (child, directory),
        ):
            saved = checkpoints_saved(directory)
            end_capture()
            assert check_intruders(site, "n3", packets, since)
            checkpoints_saved(directory, saved)
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == 128 + signal.SIGINT, out + err
        assert readable(packets) == set(MARKS)

    def test_interrupted(self, transport: Transport) -> None:
        """Ranks that do not listen."""
        words = ("--no-torch", "-p", "1", "--grace", "1", "end.py", "ignore")
        with transport.started(*words) as (child, directory):
            assert transport.waits(directory, 2)
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == 128 + signal.SIGINT, err

    def test_stopped_from_another_terminal(self, transport: Transport) -> None:
        """Ranks that save."""
        with transport.started("--no-torch", "-p", "1", "end.py", "save") as (child, directory):
            assert transport.waits(directory, 2)
            assert "running" in transport.verb("status", str(directory)).lower()
            transport.verb("stop", str(directory))
            _, err = child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == 128 + signal.SIGTERM, err
        assert said_in_logs(directory, "saved") == 2


def checkpoints_saved(directory: Path, more_than: int = 0) -> int:
    """Waits until more checkpoints than that are saved; returns their number."""
    events = directory / "events.jsonl"

    def count() -> int:
        return events.read_text().count('"event": "checkpoint",') if events.exists() else 0

    assert eventually(lambda: count() > more_than)
    return count()


def both(ended: Ended) -> str:
    """A batch's own words come back in its output, the others' on standard error."""
    return ended.out + ended.err
