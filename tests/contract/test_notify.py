"""Who is told that a run is over: by a command or a post, and never at the price of the run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest

from paceline.cli.verbs.run import command
from paceline.launch import notify
from paceline.report.record import Record
from paceline.rundir import directory
from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.spec.failure import Failure, Result

PATH = Path("/home/me/runs/digits-1")
WELL = notify.RunEnd(PATH, "digits", Result(0), 12.34, {"loss": 0.25, "accuracy": 0.975, "step": 9})
BROKEN = notify.RunEnd(
    PATH, "digits", Result(1, Failure("exception", "n2", 1, headline="ValueError: k3y-9 is bad")),
    4000.0, secrets=("k3y-9",),
)  # fmt: skip
STOPPED = replace(WELL, result=Result(130, interrupted=2), resumable=True)
NEVER = replace(WELL, result=Result(1, error="paceline: n2 refuses\n  remedy: …"), metrics={})


@pytest.mark.parametrize(
    ("ended", "outcome", "sentence"),
    [
        (WELL, "finished", "digits-1 finished after 12 s: loss 0.25, accuracy 0.975, step 9"),
        (BROKEN, "failed", "digits-1 failed after 1 h 7 min with exit status 1: "
                           "rank 1 on n2: ValueError: k3y-9 is bad"),
        (STOPPED, "interrupted", "digits-1 was stopped by SIGINT after 12 s: loss 0.25, "
                                 "accuracy 0.975, step 9"),
        (NEVER, "not started", "digits-1 could not be started: n2 refuses"),
        (replace(WELL, result=Result(3)), "failed",
         "digits-1 failed after 12 s with exit status 3: loss 0.25, accuracy 0.975, step 9"),
    ],
)  # fmt: skip
def test_what_is_told(ended: notify.RunEnd, outcome: str, sentence: str) -> None:
    assert ended.outcome == outcome
    assert ended.sentence() == sentence
    assert ended.variables()[jobenv.OUTCOME] == ended.to_json()["outcome"] == outcome


def test_a_run_that_was_left_is_told_by_the_name_that_its_user_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its folder on the supervisor's host is one of many of that name; so is that of its page."""
    there = Path("/home/me/.cache/paceline/detached/0a1b2c/run")
    monkeypatch.setattr(directory, "_display_paths", {})
    directory.set_display_path(there, "runs/digits-1")
    assert replace(WELL, path=there).sentence() == WELL.sentence()
    assert Record(there).name == "digits-1"


def test_nothing_that_is_told_says_a_rank_s_place() -> None:
    """So a job that a command starts is no part of the run that is over."""
    assert not any(jobenv.is_reserved(name) for name in WELL.variables())
    assert not any(name.startswith("PACELINE_OPT_") for name in WELL.variables())


def test_figures_are_json_everywhere() -> None:
    """A loss that is no number would be none in another language."""
    said = replace(WELL, metrics={"loss": float("nan"), "best": float("inf")}).to_json()
    assert json.loads(json.dumps(said, allow_nan=False))["metrics"] == {"loss": None, "best": None}


@pytest.mark.parametrize(
    "target", ["", " ", "a\nb", "ftp://h/x", "https://", "http:///x", "https://h:0/", "x://y"]
)
def test_what_can_be_told_nothing_is_refused(target: str) -> None:
    with pytest.raises(SettingError, match="--notify"):
        notify.check(["true", target])


def test_what_can_be_told_something() -> None:
    notify.check(["mail me", "./told.sh $PACELINE_OUTCOME", "https://h:8443/x?y", "http://u:p@h"])


def test_a_command_that_is_not_there_is_said_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "told").write_text("#!/bin/sh\n")
    (tmp_path / "told").chmod(0o700)
    fine = ["true", "echo x", "cd /", "A=1 none", "$none", "(none)", f"{tmp_path}/told x", "'a b'"]
    assert notify.missing_programs([*fine, "https://none"]) == []
    (said,) = notify.missing_programs([f"{tmp_path}/no-such --token k"])
    assert f"{tmp_path}/no-such" in said
    assert "--token" not in said


def test_one_a_line_in_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_OPT_NOTIFY", "mail -s over me\nhttps://h/x")
    option = next(param for param in command.params if param.name == "notify")
    value = option.value_from_envvar(click.Context(command))
    assert value == ["mail -s over me", "https://h/x"]


# --- commands


def tell(target: str, ended: notify.RunEnd = WELL, patience: float = 60.0) -> list[str]:
    """The warnings."""
    said: list[str] = []
    notify.notify_all([target], ended, said.append, patience)
    return said


def test_a_command_finds_all_of_it(tmp_path: Path) -> None:
    assert tell(f"cat >{tmp_path}/said; env >{tmp_path}/env", BROKEN) == []
    said = json.loads((tmp_path / "said").read_text())
    assert (said["run"], said["outcome"], said["exit_status"]) == (str(PATH), "failed", 1)
    assert said["failure"] == "rank 1 on n2: ValueError: [secret] is bad"
    lines = (tmp_path / "env").read_text().splitlines()
    assert f"PACELINE_RUN={PATH}" in lines
    assert "PACELINE_FAILURE=rank 1 on n2: ValueError: [secret] is bad" in lines
    assert "k3y-9" not in (tmp_path / "env").read_text() + (tmp_path / "said").read_text()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("exit 3", "--notify exit: it ended with exit status 3"),
        ("no-such-program --password k3y", "--notify no-such-program: it ended with exit status"),
        ("kill -9 $$", "--notify kill: it was ended by SIGKILL"),
    ],
)
def test_a_command_that_fails_costs_a_warning(command: str, why: str) -> None:
    (said,) = tell(command)
    assert said.startswith(f"paceline: warning: {why}")
    assert "k3y" not in said


def test_a_command_need_not_listen() -> None:
    """However much there is to say."""
    much = {f"figure {number}": 0.5 for number in range(20_000)}
    assert tell("exec true", replace(WELL, metrics=much)) == []
    assert len(json.loads(replace(WELL, metrics=much).variables()[jobenv.METRICS])) > 1000


def test_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    mark = tmp_path / "after"
    (said,) = tell(f"sleep 60; touch {mark}", patience=0.4)
    assert said.endswith("it was ended after 0 s")
    assert not mark.exists()


TELL = "cat >told; ls $PACELINE_RUN >files"
PLACES = {  # where the setting stands → words, environment, [run] of the file
    "command line": (("--notify", TELL), {}, ""),
    "environment": ((), {"PACELINE_OPT_NOTIFY": TELL}, ""),
    "file": ((), {}, f'notify = ["{TELL}", "false"]'),
}


@pytest.mark.parametrize(
    ("place", "script", "status", "outcome"),
    [
        ("command line", "print(1)", 0, "finished"),
        ("environment", "raise ValueError('boom')", 1, "failed"),
        ("file", "import os, signal; os.kill(LAUNCHER, signal.SIGINT); signal.pause()", 130,
         "interrupted"),
    ],
)  # fmt: skip
def test_a_run_tells_its_end(
    tmp_path: Path, place: str, script: str, status: int, outcome: str
) -> None:
    words, env, toml = PLACES[place]
    launcher = "int(open('runs/1/owner.json').read().split('\"pid\": ')[1].split(',')[0])"
    (tmp_path / "job.py").write_text(script.replace("LAUNCHER", launcher))
    (tmp_path / "paceline.toml").write_text(f"[run]\n{toml}\n")
    paceline = [sys.executable, "-m", "paceline"]
    inside: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, **env}}
    subprocess.run([*paceline, "trust"], check=True, capture_output=True, **inside)
    run = [*paceline, "run", "--no-torch", "--report", "--run-dir", "runs/1", *words, "job.py"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, **inside)
    assert done.returncode == status, done.stderr
    said = json.loads((tmp_path / "told").read_text())
    assert (said["outcome"], said["exit_status"]) == (outcome, status)
    assert said["run"] == str(tmp_path / "runs" / "1")
    there = (tmp_path / "files").read_text().split()
    assert {"result.json", "findings.json", "report.html"} <= {*there}  # all that it will hold
    assert done.stderr.count("paceline: warning: --notify false: it ended with") == bool(toml)


def test_an_address_stands_in_no_file_of_the_run(tmp_path: Path) -> None:
    """Who knows it may post there, too; and a run's page is passed on."""
    (tmp_path / "job.py").write_text("")
    words = ["run", "--no-torch", "-H", "local", "-p", "1", "--run-dir", "runs/1", "--report"]
    words += ["--notify", "http://127.0.0.1:1/services/T0/s3cr3t"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words, "job.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "runs" / "1").rglob("*") if path.is_file()]
    assert {"plan.json", "report.html"} <= {path.name for path in files}
    assert [path.name for path in files if b"s3cr3t" in path.read_bytes()] == []
    assert "s3cr3t" not in done.stderr


@pytest.mark.parametrize(
    ("target", "secret"),
    [("https://hooks.example.com/services/T0", True), ("https://me:pw@h", True),
     ("https://h?key=1", True), ("https://h", False), ("https://h/", False), ("mail me", False)],
)  # fmt: skip
def test_which_targets_are_secrets(target: str, secret: bool) -> None:
    assert notify.secret_addresses([target]) == [target] * secret


def test_a_run_that_cannot_start_tells_it(tmp_path: Path) -> None:
    told = tmp_path / "told"
    (tmp_path / "job.py").write_text("")
    words = ["run", "--no-torch", "--nnodes", "2", "-H", "localhost", "--notify", f"cat >{told}"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words, "job.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    said = json.loads(told.read_text())
    assert (said["outcome"], said["exit_status"]) == ("not started", 2)
    assert "2 nodes" in said["failure"]


# --- posts


class Server(ThreadingHTTPServer):
    """Keeps what was posted, and answers as it is told."""

    status = 200
    place = ""
    wait_s = 0.0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: list[tuple[str, dict[str, str], Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.posted.append((self.path, dict(self.headers), json.loads(body)))
        time.sleep(server.wait_s)
        self.send_response(server.status)
        if server.place:
            self.send_header("Location", server.place)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in [*os.environ]:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_post_holds_all_of_it(server: Server) -> None:
    assert tell(f"{server.url}/hook?a=1#b", BROKEN) == []
    ((path, headers, said),) = server.posted
    assert path == "/hook?a=1"
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    assert said["failure"] == "rank 1 on n2: ValueError: [secret] is bad"


def test_a_name_and_a_password_in_the_address(server: Server) -> None:
    assert tell(server.url.replace("//", "//me:a%40b@")) == []
    assert server.posted[0][1]["Authorization"] == "Basic bWU6YUBi"


@pytest.mark.parametrize("proxy", ["http_proxy", "HTTP_PROXY"])
def test_through_a_proxy(server: Server, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv(proxy, server.url)
    assert tell("http://example.invalid/hook") == []
    assert server.posted[0][0] == "http://example.invalid/hook"


@pytest.mark.parametrize(
    ("status", "place", "why"),
    [
        (404, "", "the answer was 404 Not Found"),
        (500, "", "the answer was 500 Internal Server Error"),
        (
            302,
            "http://other.example/secret",
            "the answer was 302 Found, and it leads to http://other.exa",
        ),
        (
            307,
            "http://other.example/secret",
            "the answer was 307 Temporary Redirect, and it leads to ",
        ),
    ],
)
def test_an_answer_that_is_none(server: Server, status: int, place: str, why: str) -> None:
    """What is posted to an address that leads elsewhere has not arrived."""
    server.status, server.place = status, place
    (said,) = tell(f"{server.url}/T0/s3cret?key=s3cret")
    assert said.startswith(f"paceline: warning: --notify {server.url}/…: {why}")
    assert "s3cret" not in said
    assert "/secret" not in said


def test_nobody_is_waited_for_longer_than_said(server: Server) -> None:
    server.wait_s = 1.0
    began = time.monotonic()
    said: list[str] = []
    notify.notify_all([server.url, f"{server.url}/2", "sleep 60"], WELL, said.append, 0.3)
    assert time.monotonic() - began < 20
    assert len([one for one in said if "warning" in one]) == 3


def test_nobody_there() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        (said,) = tell(f"http://127.0.0.1:{taken.getsockname()[1]}/x")
    assert "Connection refused" in said
