"""Tests how errors of a hub reach the user through the hub's own HTTP client."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from paceline.recipes.data.hub import RETRY_DELAYS_S

SCRIPT = """
import json, sys, time
time.sleep = lambda seconds: None  # the client tries again by itself, too
from paceline.recipes.data import hub
hub.prepare_environment(offline=False)
from huggingface_hub import hf_hub_download
from paceline.spec.errors import DataError
for number, endpoint in enumerate(sys.argv[1:]):
    name, waited = f"x/y{number}", []
    get = lambda: hf_hub_download(name, "config.json", endpoint=endpoint)
    try:
        text = open(hub.fetch(f"--model {name}", get, waited.append)).read()
    except DataError as error:
        text = error.render()
    print(json.dumps([waited, text]))
"""
FILE = b"a model's config"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """A server that rejects the first requests (or all), and then serves one file."""

    def __init__(self, status: int, refusals: float) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.status = status
        self.refusals = refusals

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(FILE)

    def _answer(self, content: bytes) -> None:
        self.server.refusals -= 1
        rejected = self.server.refusals >= 0
        self.send_response(self.server.status if rejected else 200)
        self.send_header("Content-Length", str(0 if rejected else len(FILE)))
        if not rejected:
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        self.wfile.write(b"" if rejected else content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def refusing_hub(status: int, refusals: float = float("inf")) -> Iterator[Hub]:
    with Hub(status, refusals) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def fetch(folder: Path, *endpoints: str, **env: str) -> list[tuple[list[float], str]]:
    """Returns, for each hub, the waits between attempts and the fetched file or the error."""
    clean = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and k[:3] != "HF_"}
    completed = subprocess.run(
        [sys.executable, "-c", SCRIPT, *endpoints],
        env={**clean, "HF_HOME": str(folder), "HF_ENDPOINT": endpoints[0], **env},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    answers = [line for line in completed.stdout.splitlines() if line.startswith("[")]
    return [(delays, text) for delays, text in map(json.loads, answers)]


REMEDIES = {
    429: "wait some minutes",
    503: "try again in some minutes",
    404: "check the id",
    401: "HF_TOKEN",
}
TRANSIENT_STATUSES = (429, 503)


def test_explains_hub_errors_and_retries_transient(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        hubs = [stack.enter_context(refusing_hub(status)) for status in REMEDIES]
        hubs.append(stack.enter_context(refusing_hub(503, refusals=1)))
        *rejected, fetched = fetch(tmp_path, *(hub.url for hub in hubs))
    for (delays, text), (status, remedy) in zip(rejected, REMEDIES.items(), strict=True):
        assert "could not be loaded" in text
        assert remedy in text
        assert delays == list(RETRY_DELAYS_S if status in TRANSIENT_STATUSES else ())
    assert fetched[1] == FILE.decode()


def test_proxy_error_names_proxy_variable(tmp_path: Path) -> None:
    with refusing_hub(407) as proxy:
        ((delays, text),) = fetch(tmp_path, "http://hub.invalid", HTTP_PROXY=proxy.url)
    assert "HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT" in text
    assert delays == []
