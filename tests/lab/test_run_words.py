"""Arguments, environment and the ranks' place, byte for byte, on the hosts of a lab."""

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
    # --no-python has no interpreter of ours in between
    ended = site.run("--no-python", sys.executable, "tell.py", *HOSTILE)
    assert ended.code == 0, ended.err
    assert ended.said(1)["argv"] == [os.fsencode(word).hex() for word in HOSTILE]


def test_hostile_arguments_reach_every_rank(site: Site) -> None:
    """And a hostile environment, in a script that runs as main from its folder."""
    values = {f"T_{n}": os.fsencode(word) for n, word in enumerate(HOSTILE)}
    given: list[str | bytes] = []
    for number, (name, value) in enumerate(values.items()):
        # one half with its value, the other forwarded from here
        given += ["--env", name.encode() + b"=" + value if number % 2 else name]
    env = {name: value for number, (name, value) in enumerate(values.items()) if not number % 2}
    env["T_STAYS"] = b"here, for nobody asked for it"
    words = ("--no-torch", "-p", "2", "--activate", "activate.sh", *given, "tell.py", *HOSTILE)
    ended = site.run(*words, env=env)
    assert ended.code == 0, ended.err
    for rank in range(4):
        said = ended.said(rank)
        assert said["argv"] == [os.fsencode(word).hex() for word in HOSTILE]
        activated = {"T_ACTIVATED": f"by n{rank // 2 + 1}, it's sourced".encode()}
        assert said["env"] == {name: value.hex() for name, value in (values | activated).items()}
        assert said["name"] == "__main__"
        assert said["cwd"] == said["path0"] == str(site.project)
        assert said["file"] == str(site.project / "tell.py")


def test_secrets_stay_out_of_process_lists_and_files(site: Site) -> None:
    secret = "s3cr3t-f0rw4rded-by-n4me"
    os.environ["T_KEY"] = secret
    try:
        with site.start("--no-torch", "--env", "T_KEY", "--env", "T_PASSWORD=typed-but-named-so",
                        "end.py", "echo") as launch:  # fmt: skip
            launch.wait_for("waiting", times=2)
            seen = _every_command_line()
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
        kept = [path for path in site.lab.home(host).rglob("*") if path.is_file()]
        assert not [path for path in kept if secret.encode() in path.read_bytes()]


def _every_command_line() -> list[str]:
    """All process lists at once: the hosts' processes are seen from here too."""
    lines = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                lines.append((folder / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return lines


def test_a_secret_is_nowhere_even_if_the_job_prints_it(site: Site, tmp_path: Path) -> None:
    """In two pieces, in an exception, by a name that says nothing; and in no support bundle."""
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


def test_ranks_are_placed_as_torchrun_places_them(site: Site) -> None:
    """Local, two processes, the same script: the same variables."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
                "--master-port=29871", "tell.py"]  # fmt: skip
    theirs = subprocess.run(torchrun, cwd=site.project, capture_output=True, text=True, check=True)
    options = ["--run-dir", str(site.fresh()), "-p", "2", "--no-torch", "--master-port=29871"]
    ours = paceline("run", *options, "tell.py", cwd=site.project)
    ours.check_returncode()
    places = [_places(done.stdout) for done in (theirs, ours)]
    for name in [*names, "MASTER_ADDR", "MASTER_PORT"]:
        # torchrun names its own machine when it is alone; any name of loopback is the same
        values = [[place[name] for place in found] for found in places]
        if name == "MASTER_ADDR":
            assert values[1] == ["127.0.0.1", "127.0.0.1"]
        else:
            assert values[0] == values[1], name


def _places(text: str) -> list[dict[str, str]]:
    decode = json.JSONDecoder().raw_decode  # torchrun lets two ranks write into one line
    said = [decode(text, found.start())[0] for found in re.finditer(r'\{"argv"', text)]
    return sorted((one["place"] for one in said), key=lambda place: int(place["RANK"]))


def test_places_over_unequal_hosts(site: Site, tmp_path: Path) -> None:
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


def test_nnodes_takes_the_first_hosts(site: Site) -> None:
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


def test_show_rank0_and_none(site: Site) -> None:
    ended = site.run("--no-torch", "--show", "rank0", "end.py", "both")
    assert "[n1/0] to out" in ended.out
    assert "/1]" not in ended.out + ended.err
    assert "to out" in (ended.directory / "logs/n2/1.log").read_text()


def test_a_flood_of_output_is_kept_whole(site: Site) -> None:
    words = ("--no-torch", "--show", "none", "--env", "T_BLOCKS=100", "end.py", "flood")
    with site.start(*words) as launch:
        ended = launch.end(60)
    assert ended.code == 0, ended.err
    for rank, host in enumerate(site.lab.names):
        log = ended.directory / f"logs/{host}/{rank}.log"
        assert log.stat().st_size == 10_000_004
        assert log.read_bytes()[-4:] == b"end\n"


def test_the_store_listens_on_loopback_and_its_gateway_on_the_chosen_address(site: Site) -> None:
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
        assert [one for one in found if not one.startswith(expected)] == []


def test_a_script_with_a_world_of_its_own_is_stopped(site: Site) -> None:
    ended = site.run("own_world.py")
    assert ended.code != 0
    assert "step 1" not in ended.out
    assert "--any-world" in ended.err
    explained = paceline("explain", str(ended.directory), "--json", cwd=site.project)
    said = json.loads(explained.stdout)
    assert said["causes"][0]["rule"] == "unplanned-world", said
    words = "became rank 0 of 1, but the plan says rank [01] of 2"  # whichever came first
    assert re.search(words, said["conclusion"])
    assert site.leftovers() == ""


def test_any_world_may_be_allowed(site: Site) -> None:
    ended = site.run("--any-world", "own_world.py")
    assert ended.code == 0, ended.err
    assert len(ended.events("world joined")) == 2
    assert "the ranks exchanged" not in ended.err


def test_all_nodes_start_again_after_a_failure(site: Site) -> None:
    ended = site.run("--no-torch", "--max-restarts", "1", "end.py", "once")
    assert ended.code == 0, ended.err
    assert ended.lines(0) == ["attempt 0 0", "attempt 1 1"]
    assert ended.lines(1)[-1] == "attempt 1 1"
    assert ended.json("plan.json")["attempt"] == 1


def test_restarts_run_out(site: Site) -> None:
    ended = site.run("--no-torch", "--max-restarts", "1", "end.py", "exit", "1")
    assert ended.code == 7
    assert "rank 1 on n2: exit status 7" in ended.err
    assert ended.err.count("starting all nodes again") == 1


def test_plan_prints_and_starts_nothing(site: Site) -> None:
    before = site.processes()
    argv = site.argv("--plan", "-v", "-p", "1", "--no-torch", "tell.py", "a b", ";")
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(argv, cwd=site.project, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "nproc_per_node" in done.stdout
    assert "command line" in done.stdout
    assert not (site.project / "runs").exists()
    assert eventually(lambda: not any(line not in before.get(host, ())  # those may end meanwhile
                                      for host, lines in site.processes().items()
                                      for line in lines))  # fmt: skip
    commands = re.findall(r"^ +rank \d+: (.*)$", done.stdout, re.MULTILINE)
    assert len(commands) == 2
    for name, typed in zip(site.lab.names, commands, strict=True):
        by_hand = site.lab.exec(name, ["sh", "-c", typed], timeout=TIMEOUT_S)
        assert by_hand.returncode == 0, by_hand.stderr
        said = json.loads(by_hand.stdout)
        assert said["argv"] == [b"a b".hex(), b";".hex()]
        assert said["place"]["PACELINE_HOST"] == name
        assert said["place"]["MASTER_ADDR"] == site.lab.address("n1")


def test_the_plan_by_hand_trains(site: Site) -> None:
    argv = site.argv("--plan", "-v", "train.py")
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(argv, cwd=site.project, env=env, capture_output=True, text=True)
    commands = re.findall(r"^ +rank \d+: (.*)$", done.stdout, re.MULTILINE)
    ranks = [
        site.lab.popen(name, ["sh", "-c", typed], stdout=subprocess.PIPE, text=True)
        for name, typed in zip(site.lab.names, commands, strict=True)
    ]
    for rank in ranks:
        out, _ = rank.communicate(timeout=TIMEOUT_S)
        assert "sum 3" in out


def test_what_ran_is_what_was_planned(site: Site) -> None:
    argv = site.argv("--plan", "--json", "--master-port", "29872", "--no-torch", "-m", "tell", "x")
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(argv, cwd=site.project, env=env, capture_output=True, text=True)
    planned = json.loads(done.stdout)
    ended = site.run("--master-port", "29872", "--no-torch", "-m", "tell", "x")
    ran = ended.json("plan.json")
    for plan in (planned, ran):
        own, typed = plan.pop("run_id"), plan.pop("typed")  # which differ
        assert "-m tell x" in typed["command"]
        for node in plan["nodes"]:
            for rank in node["ranks"]:
                assert rank["env"].pop("PACELINE_RUN_ID") == own
                assert rank["env"].pop("TORCHELASTIC_RUN_ID") == own
    assert planned == ran
    for node in ran["nodes"]:
        for rank in node["ranks"]:
            said = ended.said(rank["rank"])
            assert (said["argv"], said["name"]) == ([b"x".hex()], "__main__")
            place = said["place"]
            assert {k: v for k, v in rank["env"].items() if k in place}.items() <= place.items()
