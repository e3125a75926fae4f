"""Tests what ``paceline explain`` says about real runs that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launches import SOURCE, TEST_LIMIT_S, paceline

from paceline.lab import Lab

pytestmark = pytest.mark.lab

# What rank 1 does while the others wait: a traceback, messages, signals. Further causes in a rank's
# output are tested in tests/contract/test_recorded_failures.py and test_remedies_work.py.
FAILURES = {
    "disk-full": (
        "import os\nf = open('/srv/checkpoint', 'wb', buffering=0)\n"
        "while True: f.write(bytes(1 << 20))",
        "rank 1 on n2: the disk is full",
    ),
    "nan-loss": (
        "print('step 3 loss nan', flush=True)\nraise SystemExit('loss is not finite: nan')",
        "rank 1 on n2: the loss became nan",
    ),
    "exception": ("raise ValueError('boom')", "rank 1 on n2 raised ValueError: boom (job.py, line"),
    "killed": ("import os\nos.kill(os.getpid(), 9)", "rank 1 on n2 was killed by SIGKILL"),
    "crashed": ("import os\nos.kill(os.getpid(), 11)", "rank 1 on n2 crashed in compiled code"),
}

JOB = """
import os, time
if os.environ["RANK"] == "1":
{lines}
time.sleep(30)
"""


@dataclass(frozen=True)
class Site:
    lab: Lab
    folder: Path

    def run(self, text: str, *args: str) -> tuple[Path, str]:
        """Runs a job that fails; returns its run directory and what was shown."""
        number = len(list(self.folder.glob("run*")))
        (self.folder / "job.py").write_text(text)
        directory = self.folder / f"run{number}"
        hosts = ["-H", str(self.lab.hostfile), "--ssh-config", str(self.lab.ssh_config)]
        result = paceline("run", *hosts, "--run-dir", str(directory), *args, "job.py",
                        cwd=self.folder)  # fmt: skip
        assert result.returncode != 0
        return directory, result.stderr


def explain(directory: Path) -> tuple[int, dict[str, Any]]:
    result = paceline("explain", str(directory), "--json", cwd=directory)
    return result.returncode, json.loads(result.stdout)


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: Any) -> Site:
    folder = tmp_path_factory.mktemp("explain")
    return Site(new_lab(hosts=2, private=("/srv:8m",), share=(str(folder),)), folder)


@pytest.mark.parametrize("rule", FAILURES)
def test_names_rank_host_and_cause(site: Site, rule: str) -> None:
    lines, cause = FAILURES[rule]
    text = JOB.format(lines="\n".join(f"    {line}" for line in lines.splitlines()))
    directory, shown = site.run(text, "--no-torch")
    code, explanation = explain(directory)
    assert code == 0
    assert explanation["causes"][0]["rule"] == rule, explanation
    assert explanation["conclusion"].startswith(cause)
    assert explanation["causes"][0]["remedy"]
    findings = json.loads((directory / "findings.json").read_text())["findings"]
    assert (
        next(finding for finding in findings if finding["check"] == f"explain/{rule}")["outcome"]
        == "fail"
    )
    assert f"[{rule}]" in shown or rule == "exception"


def test_explains_uneven_data(site: Site) -> None:
    """It saves for longer than others wait; for one that exits see ``test_remedies_work.py``."""
    text = (
        "import os, datetime, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=5))\n"
        "for step in range(3 if os.environ['RANK'] == '1' else 5):\n"
        "    print('step', step, flush=True)\n    dist.all_reduce(torch.ones(4))\n"
        "dist.destroy_process_group()\nimport time; time.sleep(20)\n"
    )
    directory, _ = site.run(text)
    _, explanation = explain(directory)
    assert explanation["causes"][0]["rule"] == "uneven-data", explanation
    assert explanation["conclusion"].startswith("rank 1 on n2 ended its work after step 2")


# what rank 1 does while rank 0 waits in all_reduce (line 8)
BLOCKING_FAILURES = {
    "rank-absent": ("time.sleep(300)", "rank 1 on n2 was in alone, job.py, line 4 while rank 0 on"),
    "collective-mismatch": (
        "dist.broadcast(torch.ones(5), 0)",
        "ranks called different collectives: rank 1 on n2 broadcast (job.py, line 4, in alone), "
        "rank 0 on n1 all_reduce (job.py, line 8)",
    ),
    "stopped": ("os.kill(os.getpid(), 19)", "rank 1 on n2 is stopped (SIGSTOP, or Ctrl-Z) while"),
}


@pytest.mark.parametrize("case", BLOCKING_FAILURES)
def test_names_rank_that_blocks_collective(site: Site, case: str) -> None:
    lines, cause = BLOCKING_FAILURES[case]
    text = (
        "import os, datetime, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=10))\n"
        f"def alone():\n    {lines}\n"
        "for step in range(3):\n"
        "    if step == 2 and os.environ['RANK'] == '1':\n        alone()\n"
        "    dist.all_reduce(torch.ones(4))\n"
    )
    directory, shown = site.run(text)
    _, explanation = explain(directory)
    assert explanation["conclusion"].startswith(cause), explanation
    assert f"cause: {cause}" in shown


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        (("--lr", "1e30", "--steps", "3"), "not finite"),
        (("--data", "/no/such/folder"), "--data /no/such/folder: no such folder"),
    ],
    ids=["nan", "data"],
)
def test_explains_recipe_error(site: Site, args: tuple[str, ...], cause: str) -> None:
    directory = site.folder / f"recipe{len(list(site.folder.glob('recipe*')))}"
    hosts = ["-H", str(site.lab.hostfile), "--ssh-config", str(site.lab.ssh_config)]
    result = paceline("train", "image", *hosts, "--run-dir", str(directory), *args, cwd=site.folder)
    assert result.returncode == 1, result.stderr
    code, explanation = explain(directory)
    assert code == 0
    assert cause in explanation["conclusion"], explanation
    assert explanation["causes"][0]["remedy"]


def test_explains_killed_launcher(site: Site) -> None:
    directory = site.folder / "run-orphan"
    (site.folder / "job.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(300)\n")
    argv = [sys.executable, "-m", "paceline", "run", "-H", str(site.lab.hostfile)]
    argv += ["--ssh-config", str(site.lab.ssh_config), "--no-torch", "--lease", "2"]
    argv += ["--run-dir", str(directory), "job.py"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=site.folder, env=env) as child:
        assert child.stdout is not None
        child.stdout.readline()
        _, explanation = explain(directory)
        assert explanation["conclusion"].startswith(
            "the run has not ended: its launcher is process"
        )
        child.kill()
    code, explanation = explain(directory)
    assert (code, explanation["causes"][0]["rule"]) == (0, "launcher-killed")
    assert "the launcher was killed" in explanation["conclusion"]
    assert f"process {child.pid} on" in explanation["conclusion"]


def test_explains_code_mismatch_without_shipping(site: Site) -> None:
    text = "print('first')\n"
    other_workdir = site.lab.home("n2") / "own"
    other_workdir.mkdir()
    (other_workdir / "job.py").write_text("print('second')\n")
    settings = site.folder / "paceline.toml"
    settings.write_text(f'[hosts.n2]\nworkdir = "{site.lab.home_inside()}/own"\n')
    try:
        directory, _ = site.run(text, "--no-torch", "--ship", "never")
    finally:
        settings.unlink()
    _, explanation = explain(directory)
    assert explanation["conclusion"].startswith("the code on n2 is not the code of this machine"), (
        explanation
    )
    assert "job.py" in explanation["conclusion"]


def test_explains_missing_python(site: Site) -> None:
    (site.folder / "job.py").write_text("pass\n")
    directory = site.folder / "run-refused"
    result = paceline(
        "run", "-H", str(site.lab.hostfile), "--ssh-config", str(site.lab.ssh_config),
        "--python", "/no/python", "--run-dir", str(directory), "job.py", cwd=site.folder,
    )  # fmt: skip
    assert result.returncode != 0
    _, explanation = explain(directory)
    assert explanation["causes"][0]["rule"] == "not-started"
    assert "has no Python at /no/python" in explanation["conclusion"]


def test_explains_powered_off_host(site: Site) -> None:
    text = "import os, subprocess, time\nprint('up', flush=True)\ntime.sleep(300)\n"
    (site.folder / "job.py").write_text(text)
    directory = site.folder / "run-lost"
    argv = [sys.executable, "-m", "paceline", "run", "-H", str(site.lab.hostfile)]
    argv += ["--ssh-config", str(site.lab.ssh_config), "--no-torch", "--lease", "4"]
    argv += ["--run-dir", str(directory), "job.py"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          cwd=site.folder, env=env) as child:  # fmt: skip
        assert child.stdout is not None
        while "[n2/1] up" not in child.stdout.readline():
            assert child.poll() is None
        site.lab.fault("power-off", "n2")
        child.communicate(timeout=TEST_LIMIT_S)
    site.lab.heal("n2")
    _, explanation = explain(directory)
    assert explanation["causes"][0]["rule"] == "node-lost"
    assert explanation["conclusion"].startswith("n2 went away")


def test_reports_kernel_out_of_memory_kill(tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup/memory/paceline-test")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control group (version 1) for memory can be made here")
    try:
        (group / "memory.limit_in_bytes").write_text("300M")
        text = "    kept = []\n    while True: kept.append(bytearray(20 << 20))"
        (tmp_path / "job.py").write_text(JOB.format(lines=text))
        enter = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -m paceline run"
        result = subprocess.run(
            ["sh", "-c", f"{enter} --no-torch -p 2 --run-dir {tmp_path}/run job.py"],
            capture_output=True, text=True, cwd=tmp_path, timeout=TEST_LIMIT_S,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )  # fmt: skip
        assert result.returncode == 137, result.stderr
        assert "killed by the kernel for its memory" in result.stderr
        assert "(limit 300 MiB" in result.stderr
    finally:
        group.rmdir()


def test_foreign_log_bundle_redacts_token(tmp_path: Path) -> None:
    text = "n2: bash: torchrun: command not found\nn1: ok\nn1: done\nHF_TOKEN=hf_" + "a" * 30 + "\n"
    result = paceline("explain", "--log", "-", "--bundle", "b.tar.gz", cwd=tmp_path, text=text)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "n2: there is no program torchrun"
    packed = subprocess.run(["tar", "xzOf", "b.tar.gz"], cwd=tmp_path, capture_output=True)
    assert b"torchrun" in packed.stdout
    assert b"aaaaaaaaaa" not in packed.stdout


def test_unknown_failure_reports_unknown_cause(tmp_path: Path) -> None:
    log = "step 3 loss 0.2\nsrun: error: n7: task 3: Exited with exit code 9\n"
    result = paceline("explain", "--log", "-", cwd=tmp_path, text=log)
    assert result.returncode == 2
    assert result.stdout.startswith("unknown cause: rank 3 on n7")
    assert "to collect: " in result.stdout


def test_unrelated_log_shows_no_failure(tmp_path: Path) -> None:
    result = paceline("explain", "--log", "-", cwd=tmp_path, text="make: *** [all] Error 2\n")
    assert result.returncode == 0
    assert (
        result.stdout == "no failure found: nothing in this log shows that a training job failed\n"
    )
