"""Tests that arguments, environment and rank variables arrive on hosts byte for byte."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import SOURCE, TIMEOUT_S, Site, eventually, paceline, shared_site

pytestmark = pytest.mark.lab

HOSTILE: list[str | bytes] = [
    "a b", ";", "$HOME", "*", "'", '"', "''\"\"", "a\nb", "", " ", "\t", "\\", "`id`", "$(id)",
    "é ü 漢 🚲", b"\xff\xfe\x80", "-x", "--", "--env", "{}", "!", "#", "~", "%s", "&& false", "|",
]  # fmt: skip


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = shared_site(new_lab, tmp_path_factory.mktemp("words"), hosts=2)
    yield site
    assert site.leftovers() == ""


def test_hostile_arguments_reach_a_program(site: Site) -> None:
    # with --no-python, no interpreter of Paceline is in between
    ended = site.run("--no-python", sys.executable, "tell.py", *HOSTILE)
    assert ended.code == 0, ended.err
    assert ended.said(1)["argv"] == [os.fsencode(argument).hex() for argument in HOSTILE]


def test_hostile_arguments_and_environment_reach_ranks(site: Site) -> None:
    """With a hostile environment, in a script that runs as ``__main__`` from its folder."""
    values = {f"T_{n}": os.fsencode(argument) for n, argument in enumerate(HOSTILE)}
    env_options: list[str | bytes] = []
    for number, (name, value) in enumerate(values.items()):
        # one half with its value, the other half forwarded
        env_options += ["--env", name.encode() + b"=" + value if number % 2 else name]
    env = {name: value for number, (name, value) in enumerate(values.items()) if not number % 2}
    env["T_STAYS"] = b"here, for nobody asked for it"
    words = (
        "--no-torch",
        "-p",
        "2",
        "--activate",
        "activate.sh",
        *env_options,
        "tell.py",
        *HOSTILE,
    )
    ended = site.run(*words, env=env)
    assert ended.code == 0, ended.err
    for rank in range(4):
        parsed = ended.said(rank)
        assert parsed["argv"] == [os.fsencode(argument).hex() for argument in HOSTILE]
        activated = {"T_ACTIVATED": f"by n{rank // 2 + 1}, it's sourced".encode()}
        assert parsed["env"] == {name: value.hex() for name, value in (values | activated).items()}
        assert parsed["name"] == "__main__"
        assert parsed["cwd"] == parsed["path0"] == str(site.project)
        assert parsed["file"] == str(site.project / "tell.py")


def test_secrets_stay_out_of_process_lists_and_files(site: Site) -> None:
    secret = "s3cr3t-f0rw4rded-by-n4me"
    os.environ["T_KEY"] = secret
    try:
        with site.start("--no-torch", "--env", "T_KEY", "--env", "T_PASSWORD=typed-but-named-so",
                        "end.py", "echo") as launch:  # fmt: skip
            launch.wait_for("waiting", times=2)
            seen = _command_lines()
            launch.signal(15)
            ended = launch.end()
    finally:
        del os.environ["T_KEY"]
    assert ended.code == 143
    assert not [line for line in seen if secret in line]
    files = [path for path in ended.directory.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"plan.json", "events.jsonl", "result.json"}
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert not [path for path in files if b"typed-but-named-so" in path.read_bytes()]
    for host in site.lab.names:
        host_files = [path for path in site.lab.home(host).rglob("*") if path.is_file()]
        assert not [path for path in host_files if secret.encode() in path.read_bytes()]


def _command_lines() -> list[str]:
    """Returns all command lines; the hosts' processes are visible on this machine, too."""
    lines = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                lines.append((folder / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return lines


def test_printed_secret_is_redacted_in_logs_and_bundle(site: Site, tmp_path: Path) -> None:
    """Printed in pieces, in an exception, and under a harmless name; not in a support bundle."""
    env = {"T_TOKEN": "abcdef-123456", "T_PLAIN": "0123456789abcdefXYZ"}
    words = (
        "import os, sys, time\n"
        "for piece in (os.environ['T_TOKEN'][:5], os.environ['T_TOKEN'][5:]):\n"
        "    sys.stdout.write(piece); sys.stdout.flush(); time.sleep(0.3)\n"
        "print(os.environ['T_PLAIN'], flush=True)\n"
        "raise ValueError('the token is ' + os.environ['T_TOKEN'])\n"
    )
    (site.project / "talk.py").write_text(words)
    ended = site.run("--no-torch", "--env", "T_TOKEN", "--env", "T_PLAIN", "talk.py", env=env)
    assert ended.code == 1
    log = (ended.directory / "logs/n1/0.log").read_text()
    assert log.startswith("[secret][secret]\n")
    assert "the token is [secret]" in json.loads((ended.directory / "result.json").read_text())[
        "first_failure"]["traceback"]  # fmt: skip
    bundle = tmp_path / "bundle.tar.gz"
    paceline("explain", str(ended.directory), "--bundle", str(bundle)).check_returncode()
    packed = subprocess.run(["tar", "xzOf", bundle], capture_output=True, check=True).stdout
    files = [path.read_bytes() for path in ended.directory.rglob("*") if path.is_file()]
    for secret in env.values():
        assert not [content for content in [packed, *files] if secret.encode() in content]


def test_rank_variables_match_torchrun(site: Site) -> None:
    """A local run of two processes sets the same variables for the same script."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
                "--master-port=29871", "tell.py"]  # fmt: skip
    torchrun_result = subprocess.run(
        torchrun, cwd=site.project, capture_output=True, text=True, check=True
    )
    options = ["--run-dir", str(site.fresh()), "-p", "2", "--no-torch", "--master-port=29871"]
    paceline_result = paceline("run", *options, "tell.py", cwd=site.project)
    paceline_result.check_returncode()
    by_launcher = [_rank_variables(result.stdout) for result in (torchrun_result, paceline_result)]
    for name in [*names, "MASTER_ADDR", "MASTER_PORT"]:
        # On one machine, torchrun uses the machine's name; all names of loopback are equivalent.
        values = [[variables[name] for variables in found] for found in by_launcher]
        if name == "MASTER_ADDR":
            assert values[1] == ["127.0.0.1", "127.0.0.1"]
        else:
            assert values[0] == values[1], name


def _rank_variables(text: str) -> list[dict[str, str]]:
    decode = json.JSONDecoder().raw_decode  # torchrun may put two ranks' output on one line
    parsed = [decode(text, found.start())[0] for found in re.finditer(r'\{"argv"', text)]
    return sorted(
        (entry["place"] for entry in parsed), key=lambda variables: int(variables["RANK"])
    )


def test_rank_variables_on_unequal_hosts(site: Site, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("n1 slots=2\nn2 slots=1\n")
    ended = site.run("--no-torch", "tell.py", hosts=str(hostfile))
    assert ended.code == 0, ended.err
    keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "PACELINE_HOST"]
    found = [[ended.said(rank)["place"][key] for key in keys] for rank in range(3)]
    assert found == [
        ["0", "0", "3", "2", "0", "n1"],
        ["1", "1", "3", "2", "0", "n1"],
        ["2", "0", "3", "1", "1", "n2"],
    ]
    assert {ended.said(rank)["place"]["MASTER_ADDR"] for rank in range(3)} == {"127.0.0.1"}
    own = [set(ended.said(rank)["cpus"]) for rank in range(3)]
    cpus = os.sched_getaffinity(0)
    if len(cpus) >= 2:
        assert not own[0] & own[1]
    assert own[2] == cpus


def test_nnodes_selects_first_hosts(site: Site) -> None:
    ended = site.run("--no-torch", "--nnodes", "1", "tell.py")
    assert ended.code == 0, ended.err
    assert ended.said(0)["place"]["PACELINE_HOST"] == "n1"
    assert "[n2/" not in ended.out


def test_output_is_labelled_and_logs_are_complete(site: Site) -> None:
    ended = site.run("--no-torch", "end.py", "both")
    assert sorted(ended.out.split("\n"))[1:] == ["[n1/0] to out", "[n2/1] to out"]
    assert "[n2/1] to err" in ended.err
    log = (ended.directory / "logs/n2/1.log").read_text()
    assert sorted(log.split("\n"))[1:] == ["to err", "to out"]


def test_show_rank0(site: Site) -> None:
    ended = site.run("--no-torch", "--show", "rank0", "end.py", "both")
    assert "[n1/0] to out" in ended.out
    assert "/1]" not in ended.out + ended.err
    assert "to out" in (ended.directory / "logs/n2/1.log").read_text()


def test_large_output_is_logged_completely(site: Site) -> None:
    words = ("--no-torch", "--show", "none", "--env", "T_BLOCKS=100", "end.py", "flood")
    with site.start(*words) as launch:
        ended = launch.end(60)
    assert ended.code == 0, ended.err
    for rank, host in enumerate(site.lab.names):
        log = ended.directory / f"logs/{host}/{rank}.log"
        assert log.stat().st_size == 10_000_004
        assert log.read_bytes()[-4:] == b"end\n"


def test_store_listens_on_loopback_behind_gateway(site: Site) -> None:
    with site.start("train.py", "2") as launch:
        launch.wait_for("sum 3", times=2)
        listening = {name: site.lab.listeners(name) for name in site.lab.names}
        ended = launch.end()
    assert ended.code == 0, ended.err
    assert [event["world_size"] for event in ended.events("world joined")] == [2, 2]
    address = site.lab.address("n1")
    port = ended.json("plan.json")["master"]["port"]
    assert {f"{address}:{port}", f"127.0.0.1:{port}"} <= set(listening["n1"])
    for name, found in listening.items():
        expected = ("127.0.0.", f"{site.lab.address(name)}:")
        assert [entry for entry in found if not entry.startswith(expected)] == []


def test_script_with_unplanned_world_is_stopped(site: Site) -> None:
    ended = site.run("own_world.py")
    assert ended.code != 0
    assert "step 1" not in ended.out
    assert "--any-world" in ended.err
    explained = paceline("explain", str(ended.directory), "--json", cwd=site.project)
    parsed = json.loads(explained.stdout)
    assert parsed["causes"][0]["rule"] == "unplanned-world", parsed
    words = "became rank 0 of 1, but the plan says rank [01] of 2"  # whichever rank came first
    assert re.search(words, parsed["conclusion"])
    assert site.leftovers() == ""


def test_any_world_option_allows_unplanned_world(site: Site) -> None:
    ended = site.run("--any-world", "own_world.py")
    assert ended.code == 0, ended.err
    assert len(ended.events("world joined")) == 2
    assert "the ranks exchanged" not in ended.err


def test_failure_restarts_nodes(site: Site) -> None:
    ended = site.run("--no-torch", "--max-restarts", "1", "end.py", "once")
    assert ended.code == 0, ended.err
    assert ended.lines(0) == ["attempt 0 0", "attempt 1 1"]
    assert ended.lines(1)[-1] == "attempt 1 1"
    assert ended.json("plan.json")["attempt"] == 1


def test_restarted_rank_shows_stderr_after_exception(site: Site) -> None:
    ended = site.run("--no-torch", "--max-restarts", "1", "end.py", "recover")
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        assert f"attempt 1 of {rank} to err" in ended.err


def test_fails_when_restarts_are_used_up(site: Site) -> None:
    ended = site.run("--no-torch", "--max-restarts", "1", "end.py", "exit", "1")
    assert ended.code == 7
    assert "rank 1 on n2: exit status 7" in ended.err
    assert ended.err.count("starting all nodes again") == 1


def test_last_lines_are_of_last_attempt(site: Site) -> None:
    options = ("--no-torch", "--show", "none", "--max-restarts", "1")
    ended = site.run(*options, "end.py", "differently")
    assert ended.code == 1
    summary = ended.err[ended.err.index("paceline: failed first") :]
    assert "its last lines:\n    disk quota is used up" in summary
    assert "boom" not in summary
    assert "Traceback" not in summary


def test_plan_prints_commands_but_does_not_start_ranks(site: Site) -> None:
    initial = site.processes()
    argv = site.argv("--plan", "-v", "-p", "1", "--no-torch", "tell.py", "a b", ";")
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run(argv, cwd=site.project, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "nproc_per_node" in result.stdout
    assert "command line" in result.stdout
    assert not (site.project / "runs").exists()
    assert eventually(lambda: not any(line not in initial.get(host, ())  # earlier ones may end
                                      for host, lines in site.processes().items()
                                      for line in lines))  # fmt: skip
    commands = re.findall(r"^ +rank \d+: (.*)$", result.stdout, re.MULTILINE)
    assert len(commands) == 2
    for name, command in zip(site.lab.names, commands, strict=True):
        manual_result = site.lab.exec(name, ["sh", "-c", command], timeout=TIMEOUT_S)
        assert manual_result.returncode == 0, manual_result.stderr
        parsed = json.loads(manual_result.stdout)
        assert parsed["argv"] == [b"a b".hex(), b";".hex()]
        assert parsed["place"]["PACELINE_HOST"] == name
        assert parsed["place"]["MASTER_ADDR"] == site.lab.address("n1")


def test_planned_commands_train_when_typed(site: Site) -> None:
    argv = site.argv("--plan", "-v", "train.py")
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run(argv, cwd=site.project, env=env, capture_output=True, text=True)
    commands = re.findall(r"^ +rank \d+: (.*)$", result.stdout, re.MULTILINE)
    ranks = [
        site.lab.popen(name, ["sh", "-c", command], stdout=subprocess.PIPE, text=True)
        for name, command in zip(site.lab.names, commands, strict=True)
    ]
    for rank in ranks:
        out, _ = rank.communicate(timeout=TIMEOUT_S)
        assert "sum 3" in out


def test_run_matches_plan(site: Site) -> None:
    argv = site.argv("--plan", "--json", "--master-port", "29872", "--no-torch", "-m", "tell", "x")
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run(argv, cwd=site.project, env=env, capture_output=True, text=True)
    planned = json.loads(result.stdout)
    ended = site.run("--master-port", "29872", "--no-torch", "-m", "tell", "x")
    actual_plan = ended.json("plan.json")
    for plan in (planned, actual_plan):
        own, command = plan.pop("run_id"), plan.pop("typed")  # these differ
        assert "-m tell x" in command["command"]
        for node in plan["nodes"]:
            for rank in node["ranks"]:
                assert rank["env"].pop("PACELINE_RUN_ID") == own
                assert rank["env"].pop("TORCHELASTIC_RUN_ID") == own
    assert planned == actual_plan
    for node in actual_plan["nodes"]:
        for rank in node["ranks"]:
            parsed = ended.said(rank["rank"])
            assert (parsed["argv"], parsed["name"]) == ([b"x".hex()], "__main__")
            variables = parsed["place"]
            assert {
                k: v for k, v in rank["env"].items() if k in variables
            }.items() <= variables.items()
