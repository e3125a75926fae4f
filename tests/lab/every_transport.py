"""Defines the tests that every transport must pass, as a base class of each transport's tests."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from captures import MARKS, captured, readable
from intruders import check_intruders
from launches import TIMEOUT_S, Ended, eventually
from transports import Transport, contents, largest_difference, reference, said_in_logs

# files that a batch scheduler adds to a run directory
BATCH_FILES = {"batch.json", "job.sbatch"}


class EveryTransport:
    """Tests a transport, which the module's ``transport`` fixture provides and cleans up.

    Attributes:
        redials: Whether a host whose agent is lost is connected again.
    """

    redials = True

    def test_ranks_have_expected_environment(self, transport: Transport) -> None:
        """Ranks follow the order of the hosts and have the activation script's variables."""
        options = ("--no-torch", "-p", "2", "--activate", "activate.sh")
        ended = transport.run(*options, "tell.py", "a b", "$HOME;x'\"")
        assert ended.code == 0, ended.err
        places = [ended.said(rank)["place"] for rank in range(4)]
        assert [place["PACELINE_HOST"] for place in places] == ["n1", "n1", "n2", "n2"]
        assert [place["RANK"] for place in places] == ["0", "1", "2", "3"]
        arguments = [bytes.fromhex(argument).decode() for argument in ended.said(3)["argv"]]
        assert arguments == ["a b", "$HOME;x'\""]
        activated = [bytes.fromhex(ended.said(rank)["env"]["T_ACTIVATED"]) for rank in (1, 2)]
        assert activated == [b"by n1, it's sourced", b"by n2, it's sourced"]
        assert ended.json("result.json")["exit_code"] == 0

    def test_result_matches_ssh_run(self, transport: Transport) -> None:
        run_directory = transport.trains().directory
        assert largest_difference(run_directory, reference(transport.site)) < 1e-10
        files = {
            name for name in contents(run_directory) if not name.startswith("slurm-")
        } - BATCH_FILES
        assert files == contents(reference(transport.site))

    def test_reports_killed_rank(self, transport: Transport) -> None:
        ended = transport.run("--no-torch", "-p", "1", "end.py", "kill", "1")
        assert ended.code == 128 + signal.SIGKILL, ended.err
        assert "rank 1 on n2: killed by SIGKILL" in both(ended), both(ended)

    def test_lost_rank_rejoins(self, transport: Transport) -> None:
        """With its agent, if the transport can start that again."""
        lost = "orphan" if self.redials else "dies"
        ended = transport.run("--no-torch", "-p", "1", "member.py", "60", lost, "1")
        assert ended.code == 0, both(ended)
        (recovery,) = ended.json("result.json")["recoveries"]["of"]
        assert recovery["who"] == ["rank 1 on n2"]
        assert ("the agent was killed" in recovery["why"]) is self.redials
        assert "rank 1 on n2 is back after" in both(ended), both(ended)

    def test_encrypted_traffic_is_unreadable(self, transport: Transport) -> None:
        packets = transport.site.project.parent / "packets"
        with captured(transport.site, packets):
            ended = transport.run("--encrypt", "-p", "1", "marked.py", "30")
        assert ended.code == 0, both(ended)
        assert both(ended).count("weights as before") == 2
        assert readable(packets) == set()

    def test_rejects_intruders(self, transport: Transport) -> None:
        """Only a host that sees all packets can read what ranks send without encryption."""
        site, start_time = transport.site, time.time()
        packets = site.project.parent / "packets"
        with (
            captured(site, packets) as end_capture,
            transport.started("-p", "1", "marked.py", "100000") as (child, directory),
        ):
            saved = checkpoints_saved(directory)
            end_capture()
            assert check_intruders(site, "n3", packets, start_time)
            checkpoints_saved(directory, saved)
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == 128 + signal.SIGINT, out + err
        assert readable(packets) == set(MARKS)

    def test_interrupt_ends_unresponsive_ranks(self, transport: Transport) -> None:
        """Here, the ranks ignore the signal."""
        options = ("--no-torch", "-p", "1", "--grace", "1", "end.py", "ignore")
        with transport.started(*options) as (child, directory):
            assert transport.waits(directory, 2)
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == 128 + signal.SIGINT, err

    def test_stop_command_saves_and_ends_run(self, transport: Transport) -> None:
        """Here, the ranks save and exit."""
        with transport.started("--no-torch", "-p", "1", "end.py", "save") as (child, directory):
            assert transport.waits(directory, 2)
            assert "running" in transport.verb("status", str(directory)).lower()
            transport.verb("stop", str(directory))
            _, err = child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == 128 + signal.SIGTERM, err
        assert said_in_logs(directory, "saved") == 2


def checkpoints_saved(directory: Path, more_than: int = 0) -> int:
    """Waits until more than ``more_than`` checkpoints are saved; returns their number."""
    events = directory / "events.jsonl"

    def count() -> int:
        return events.read_text().count('"event": "checkpoint",') if events.exists() else 0

    assert eventually(lambda: count() > more_than)
    return count()


def both(ended: Ended) -> str:
    """Returns both streams: a batch prints messages on stdout, other launches on stderr."""
    return ended.out + ended.err
