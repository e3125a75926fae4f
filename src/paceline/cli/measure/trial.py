"""The short job at the end of a full check: it loads torch everywhere and tries collectives."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.bandwidth import COLLECTIVES, PARTS
from paceline.checks.check import Survey
from paceline.launch.launcher import run_job
from paceline.launch.results.run_outcome import RunOutcome
from paceline.launch.terminal.screen import Screen
from paceline.remote.openssh import SshOptions
from paceline.rundir.records import read_records
from paceline.schedulers import DEFAULT, load
from paceline.schedulers.scheduler import Options
from paceline.spec.errors import PacelineError
from paceline.spec.events import Event, read_events
from paceline.spec.hosts import Cluster
from paceline.spec.job import Entry, Job
from paceline.spec.rundir import EVENTS
from paceline.spec.settings import Setting

MODULE = "paceline.bench.collectives_job"
RESULT = "collectives.json"
LIMIT_S = 300.0  # usually it takes seconds; a host may never say that its rank has ended


class SilentScreen(Screen):
    """Says nothing: the check has its own screen."""

    def note(self, text: str) -> None:
        """Drops the launcher's notes."""

    def starting(self, part: str, done: int, of: int) -> None:
        """Drops the progress."""


def run_trial(survey: Survey, job: Job, ssh: SshOptions) -> dict[str, Any]:
    """Returns the evidence for the check ``trial``: loaded versions by host, rows, or an error."""
    is_overdue = threading.Event()

    def stop() -> None:
        is_overdue.set()
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher stops the job

    timer = threading.Timer(LIMIT_S, stop)
    timer.daemon = True
    with tempfile.TemporaryDirectory(prefix="paceline-trial-") as folder:
        path = Path(folder) / "run"
        # while the launcher does not handle the signal, it must not end this process
        former = signal.signal(signal.SIGTERM, lambda *_: None)
        timer.start()
        try:
            transport = load(DEFAULT).start(Options(ssh=ssh))
            outcome = run_job(trial_job(job), Cluster(survey.present), transport,
                              SilentScreen("none"), run_dir=path, parent=path,
                              package=PARTS)  # fmt: skip
        except PacelineError as error:
            return {
                "loaded": _loaded_libraries(read_events(read_records(path / EVENTS))),
                "rows": [],
                "error": error.message,
                "remedy": error.remedy,
            }
        finally:
            timer.cancel()
            signal.signal(signal.SIGTERM, former)
        if is_overdue.is_set():
            return {
                "loaded": _loaded_libraries(outcome.events),
                "rows": [],
                "error": f"it had not ended after {LIMIT_S:.0f} s",
                "remedy": "Start your script on these hosts: a line names the rank that hangs",
            }
        return {"loaded": _loaded_libraries(outcome.events), **_result(outcome)}


def trial_job(job: Job) -> Job:
    """Returns a job with one rank per host that tries each collective with two sizes."""
    # the call that is checked and the first timed one are warm-up enough
    spec = {"collectives": COLLECTIVES, "sizes": [1024, 1 << 20], "iterations": 2, "warmup": 0}
    return Job(
        name="trial",
        entry=Entry("module", MODULE, (json.dumps(spec),)),
        workdir=job.workdir,
        python=job.python,
        nproc_per_node=Setting(1),
        interface=job.interface,
    )


def _result(outcome: RunOutcome) -> dict[str, Any]:
    if outcome.result.exit_code:
        from paceline.explain.conclusion import conclude
        from paceline.explain.evidence_reader import from_result
        from paceline.explain.rules import load_all

        diagnosis = conclude(from_result(outcome.path, outcome.result, outcome.events), load_all())
        rule, match = diagnosis.matches[0] if diagnosis.matches else (None, None)
        remedy = (match.remedy or rule.sections["Remedy"]) if match and rule else ""
        hosts = list(match.hosts) if match else []
        return {"rows": [], "error": diagnosis.text, "remedy": remedy, "hosts": hosts}
    report = json.loads((outcome.path / RESULT).read_text(encoding="utf-8"))
    return {"rows": report["rows"], "backend": report["backend"]}


def _loaded_libraries(events: Sequence[Event]) -> dict[str, Any]:
    names = ("torch", "cuda", "nccl", "backends")
    return {event.host: {name: event[name] for name in names}
            for event in events if event.kind == "imported"}  # fmt: skip
