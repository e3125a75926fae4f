"""Tests notifications at the end of a run, by command or HTTP, which cannot harm the run."""

from __future__ import annotations

import json
import os
import re
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
FINISHED = notify.RunEnd(
    PATH, "digits", Result(0), 12.34, {"loss": 0.25, "accuracy": 0.975, "step": 9}
)
FAILED = notify.RunEnd(
    PATH, "digits", Result(1, Failure("exception", "n2", 1, headline="ValueError: k3y-9 is bad")),
    4000.0, secrets=("k3y-9",),
)  # fmt: skip
INTERRUPTED = replace(FINISHED, result=Result(130, interrupted=2), resumable=True)
NOT_STARTED = replace(
    FINISHED, result=Result(1, error="paceline: n2 refuses\n  remedy: …"), metrics={}
)


@pytest.mark.parametrize(
    ("run_end", "outcome", "sentence"),
    [
        (FINISHED, "finished", "digits-1 finished after 12 s: loss 0.25, accuracy 0.975, step 9"),
        (FAILED, "failed", "digits-1 failed after 1 h 7 min with exit status 1: "
                           "rank 1 on n2: ValueError: k3y-9 is bad"),
        (INTERRUPTED, "interrupted", "digits-1 was stopped by SIGINT after 12 s: loss 0.25, "
                                 "accuracy 0.975, step 9"),
        (NOT_STARTED, "not started", "digits-1 could not be started: n2 refuses"),
        (replace(FINISHED, result=Result(3)), "failed",
         "digits-1 failed after 12 s with exit status 3: loss 0.25, accuracy 0.975, step 9"),
    ],
)  # fmt: skip
def test_describes_outcome(run_end: notify.RunEnd, outcome: str, sentence: str) -> None:
    assert run_end.outcome == outcome
    assert run_end.sentence() == sentence
    assert run_end.variables()[jobenv.OUTCOME] == run_end.to_json()["outcome"] == outcome


def test_detached_run_uses_display_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the supervisor's host, all folders and pages of detached runs have the same name."""
    there = Path("/home/me/.cache/paceline/detached/0a1b2c/run")
    monkeypatch.setattr(directory, "_display_paths", {})
    directory.set_display_path(there, "runs/digits-1")
    assert replace(FINISHED, path=there).sentence() == FINISHED.sentence()
    assert Record(there).name == "digits-1"


def test_variables_exclude_rank_environment() -> None:
    """A job that the notification's command starts must not become a part of the ended run."""
    assert not any(jobenv.is_reserved(name) for name in FINISHED.variables())
    assert not any(name.startswith("PACELINE_OPT_") for name in FINISHED.variables())


def test_non_finite_metrics_become_null() -> None:
    """NaN is not valid JSON in other languages."""
    message = replace(FINISHED, metrics={"loss": float("nan"), "best": float("inf")}).to_json()
    assert json.loads(json.dumps(message, allow_nan=False))["metrics"] == {
        "loss": None,
        "best": None,
    }


@pytest.mark.parametrize(
    "target", ["", " ", "a\nb", "ftp://h/x", "https://", "http:///x", "https://h:0/", "x://y"]
)
def test_rejects_invalid_targets(target: str) -> None:
    with pytest.raises(SettingError, match="--notify"):
        notify.check(["true", target])


def test_accepts_valid_targets() -> None:
    notify.check(["mail me", "./told.sh $PACELINE_OUTCOME", "https://h:8443/x?y", "http://u:p@h"])


def test_detects_missing_programs(tmp_path: Path) -> None:
    (tmp_path / "told").write_text("#!/bin/sh\n")
    (tmp_path / "told").chmod(0o700)
    valid = ["true", "echo x", "cd /", "A=1 none", "$none", "(none)", f"{tmp_path}/told x", "'a b'"]
    assert notify.missing_programs([*valid, "https://none"]) == []
    (message,) = notify.missing_programs([f"{tmp_path}/no-such --token k"])
    assert f"{tmp_path}/no-such" in message
    assert "--token" not in message


def test_variable_is_split_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_OPT_NOTIFY", "mail -s over me\nhttps://h/x")
    option = next(param for param in command.params if param.name == "notify")
    value = option.value_from_envvar(click.Context(command))
    assert value == ["mail -s over me", "https://h/x"]


# --- commands


def collect_warnings(
    target: str, run_end: notify.RunEnd = FINISHED, patience: float = 60.0
) -> list[str]:
    """Sends a notification, and returns the warnings."""
    message: list[str] = []
    notify.notify_all([target], run_end, message.append, patience)
    return message


def test_command_gets_report_without_secrets(tmp_path: Path) -> None:
    assert collect_warnings(f"cat >{tmp_path}/said; env >{tmp_path}/env", FAILED) == []
    message = json.loads((tmp_path / "said").read_text())
    assert (message["run"], message["outcome"], message["exit_status"]) == (str(PATH), "failed", 1)
    assert message["failure"] == "rank 1 on n2: ValueError: [secret] is bad"
    lines = (tmp_path / "env").read_text().splitlines()
    assert f"PACELINE_RUN={PATH}" in lines
    assert "PACELINE_FAILURE=rank 1 on n2: ValueError: [secret] is bad" in lines
    assert "k3y-9" not in (tmp_path / "env").read_text() + (tmp_path / "said").read_text()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("exit 3", "--notify exit: it ended with exit status 3"),
        ("no-such-program --password k3y", "--notify no-such-program: it ended with exit status"),
        ("kill -9 $$", "--notify kill: it was ended by SIGKILL"),
    ],
)
def test_failing_command_gives_warning(command: str, reason: str) -> None:
    (message,) = collect_warnings(command)
    assert message.startswith(f"paceline: warning: {reason}")
    assert "k3y" not in message


def test_command_may_ignore_input() -> None:
    """The notification may be large."""
    large_metrics = {f"figure {number}": 0.5 for number in range(20_000)}
    assert collect_warnings("exec true", replace(FINISHED, metrics=large_metrics)) == []
    assert (
        len(json.loads(replace(FINISHED, metrics=large_metrics).variables()[jobenv.METRICS])) > 1000
    )


def test_ends_command_after_timeout(tmp_path: Path) -> None:
    mark = tmp_path / "after"
    (message,) = collect_warnings(f"sleep 60; touch {mark}", patience=0.4)
    assert re.search(r"it was ended after \d+ s$", message)
    assert not mark.exists()


NOTIFY_COMMAND = "cat >told; ls $PACELINE_RUN >files"
PLACES = {  # source of the setting → arguments, environment, [run] in the file
    "command line": (("--notify", NOTIFY_COMMAND), {}, ""),
    "environment": ((), {"PACELINE_OPT_NOTIFY": NOTIFY_COMMAND}, ""),
    "file": ((), {}, f'notify = ["{NOTIFY_COMMAND}", "false"]'),
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
def test_run_sends_notification(
    tmp_path: Path, place: str, script: str, status: int, outcome: str
) -> None:
    arguments, env, toml = PLACES[place]
    launcher = "int(open('runs/1/owner.json').read().split('\"pid\": ')[1].split(',')[0])"
    (tmp_path / "job.py").write_text(script.replace("LAUNCHER", launcher))
    (tmp_path / "paceline.toml").write_text(f"[run]\n{toml}\n")
    paceline = [sys.executable, "-m", "paceline"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, **env}}
    subprocess.run([*paceline, "trust"], check=True, capture_output=True, **options)
    run = [*paceline, "run", "--no-torch", "--report", "--run-dir", "runs/1", *arguments, "job.py"]
    process = subprocess.run(run, capture_output=True, text=True, timeout=120, **options)
    assert process.returncode == status, process.stderr
    message = json.loads((tmp_path / "told").read_text())
    assert (message["outcome"], message["exit_status"]) == (outcome, status)
    assert message["run"] == str(tmp_path / "runs" / "1")
    there = (tmp_path / "files").read_text().split()
    assert {"result.json", "findings.json", "report.html"} <= {*there}  # all final files
    assert process.stderr.count("paceline: warning: --notify false: it ended with") == bool(toml)


def test_run_files_omit_notify_address(tmp_path: Path) -> None:
    """Anyone who knows the address can post there, and pages of runs are passed on."""
    (tmp_path / "job.py").write_text("")
    arguments = ["run", "--no-torch", "-H", "local", "-p", "1", "--run-dir", "runs/1", "--report"]
    arguments += ["--notify", "http://127.0.0.1:1/services/T0/s3cr3t"]
    process = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments, "job.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    files = [path for path in (tmp_path / "runs" / "1").rglob("*") if path.is_file()]
    assert {"plan.json", "report.html"} <= {path.name for path in files}
    assert [path.name for path in files if b"s3cr3t" in path.read_bytes()] == []
    assert "s3cr3t" not in process.stderr


@pytest.mark.parametrize(
    ("target", "secret"),
    [("https://hooks.example.com/services/T0", True), ("https://me:pw@h", True),
     ("https://h?key=1", True), ("https://h", False), ("https://h/", False), ("mail me", False)],
)  # fmt: skip
def test_recognizes_secret_targets(target: str, secret: bool) -> None:
    assert notify.secret_addresses([target]) == [target] * secret


def test_notifies_of_failed_start(tmp_path: Path) -> None:
    report_path = tmp_path / "told"
    (tmp_path / "job.py").write_text("")
    arguments = [
        "run",
        "--no-torch",
        "--nnodes",
        "2",
        "-H",
        "localhost",
        "--notify",
        f"cat >{report_path}",
    ]
    process = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments, "job.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert process.returncode == 2, process.stderr
    message = json.loads(report_path.read_text())
    assert (message["outcome"], message["exit_status"]) == ("not started", 2)
    assert "2 nodes" in message["failure"]


# --- HTTP requests


class Server(ThreadingHTTPServer):
    """Keeps the requests, and answers with the configured status."""

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


def test_post_contains_report(server: Server) -> None:
    assert collect_warnings(f"{server.url}/hook?a=1#b", FAILED) == []
    ((path, headers, message),) = server.posted
    assert path == "/hook?a=1"
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    assert message["failure"] == "rank 1 on n2: ValueError: [secret] is bad"


def test_post_uses_credentials_of_url(server: Server) -> None:
    assert collect_warnings(server.url.replace("//", "//me:a%40b@")) == []
    assert server.posted[0][1]["Authorization"] == "Basic bWU6YUBi"


@pytest.mark.parametrize("proxy", ["http_proxy", "HTTP_PROXY"])
def test_post_uses_proxy(server: Server, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv(proxy, server.url)
    assert collect_warnings("http://example.invalid/hook") == []
    assert server.posted[0][0] == "http://example.invalid/hook"


@pytest.mark.parametrize(
    ("status", "place", "reason"),
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
def test_error_response_gives_warning(server: Server, status: int, place: str, reason: str) -> None:
    """A redirected request counts as not delivered."""
    server.status, server.place = status, place
    (message,) = collect_warnings(f"{server.url}/T0/s3cret?key=s3cret")
    assert message.startswith(f"paceline: warning: --notify {server.url}/…: {reason}")
    assert "s3cret" not in message
    assert "/secret" not in message


def test_limits_total_waiting_time(server: Server) -> None:
    server.wait_s = 1.0
    start_time = time.monotonic()
    message: list[str] = []
    notify.notify_all([server.url, f"{server.url}/2", "sleep 60"], FINISHED, message.append, 0.3)
    assert time.monotonic() - start_time < 20
    assert len([line for line in message if "warning" in line]) == 3


def test_refused_connection_gives_warning() -> None:
    with closing(socket.socket()) as unused_socket:
        unused_socket.bind(("127.0.0.1", 0))  # bound, but not listening
        (message,) = collect_warnings(f"http://127.0.0.1:{unused_socket.getsockname()[1]}/x")
    assert "Connection refused" in message
