"""A server that speaks the part of W&B's protocol that its client uses: GraphQL and file streams.

Runs are kept in memory. An existing run is resumed, as by the real server.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "me"


@dataclass
class Run:
    """A run as the server knows it.

    Attributes:
        config: The client's last configuration.
        lines: Lines of each streamed file, by their numbers.
        files: Names of the uploaded files.
        ended: Exit statuses with which the client ended the run.
    """

    config: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, dict[int, str]] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    ended: list[int] = field(default_factory=list)

    def records(self, name: str = "wandb-history.jsonl") -> list[dict[str, Any]]:
        stream = self.lines.get(name, {})
        return [json.loads(stream[at]) for at in sorted(stream)]

    def summary(self) -> dict[str, Any]:
        found = self.records("wandb-summary.json")
        return found[-1] if found else {}


class WandbServer:
    """Answers on loopback inside the ``with`` block, each time after ``slow_s`` seconds."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.runs: dict[str, Run] = {}
        self.slow_s = slow_s
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_POST(self) -> None:
                body = read(self)
                server.wait()
                answer = server.answered(self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_PUT = do_POST

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))

    def __enter__(self) -> WandbServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def wait(self) -> None:
        self._over.wait(self.slow_s)

    def answered(self, path: str, body: bytes) -> dict[str, Any]:
        """Returns the answer to a request; unknown requests and fields get an empty object."""
        with self._lock:
            if path == "/graphql":
                asked = json.loads(body)
                operation = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
                act = getattr(self, f"_{operation[1]}", None) if operation else None
                return {"data": act(asked["variables"]) if act else {}}
            if match := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path):
                self._streamed(self.runs[match[1]], json.loads(body))
            elif match := re.fullmatch(r"/upload/([^/]+)/(.+)", path):
                self.runs[match[1]].files.add(match[2])
            return {}

    def _RunResumeStatus(self, asked: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(asked["name"])
        bucket = None
        if run is not None:
            history, events = run.records(), run.records("wandb-events.jsonl")
            bucket = {
                **self._bucket(asked["name"], run),
                "summaryMetrics": json.dumps(run.summary()),
                "logLineCount": len(run.lines.get("output.log", {})),
                "eventsLineCount": len(events),
                "historyTail": json.dumps([json.dumps(one) for one in history[-1:]]),
                "eventsTail": json.dumps([json.dumps(one) for one in events[-1:]]),
                "tags": [],
                "notes": "",
                "wandbConfig": json.dumps({"t": 1}),
            }
        entity = {"id": ENTITY, "name": ENTITY}
        return {"model": {"id": "p", "name": asked["project"], "entity": entity, "bucket": bucket}}

    def _UpsertBucket(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked["name"]
        inserted = name not in self.runs
        run = self.runs.setdefault(name, Run())
        if asked.get("config"):
            run.config = {k: v["value"] for k, v in json.loads(asked["config"]).items()}
        project = {"id": "p", "name": asked["project"], "entity": {"id": ENTITY, "name": ENTITY}}
        bucket = {**self._bucket(name, run), "project": project, "description": "", "sweepName": ""}
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _CreateRunFiles(self, asked: dict[str, Any]) -> dict[str, Any]:
        run = asked["run"]
        files = [{"name": n, "uploadUrl": f"{self.url}/upload/{run}/{n}"} for n in asked["files"]]
        return {"createRunFiles": {"runID": run, "uploadHeaders": [], "files": files}}

    def _bucket(self, name: str, run: Run) -> dict[str, Any]:
        config = json.dumps({key: {"value": value} for key, value in run.config.items()})
        return {"id": name, "name": name, "displayName": name, "config": config,
                "historyLineCount": len(run.records())}  # fmt: skip

    def _streamed(self, run: Run, said: dict[str, Any]) -> None:
        for name, part in (said.get("files") or {}).items():
            stream = run.lines.setdefault(name, {})
            stream |= dict(enumerate(part["content"], part["offset"]))
        if said.get("complete"):
            run.ended.append(said["exitcode"])


def read(request: BaseHTTPRequestHandler) -> bytes:
    """Returns the body of a request, which may be chunked or compressed."""
    if request.headers.get("Transfer-Encoding") == "chunked":
        body = b""
        while size := int(request.rfile.readline(), 16):
            body += request.rfile.read(size)
            request.rfile.readline()
        request.rfile.readline()
    else:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
    return gzip.decompress(body) if request.headers.get("Content-Encoding") == "gzip" else body
