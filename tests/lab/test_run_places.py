"""Where a job runs: code in place, shipped or refused; launchers among the hosts or outside."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import SOURCE, TIMEOUT_S, Site, project_at
from safetensors.torch import save_file

from paceline.recipes.networks import MODELS

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def apart(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The hosts do not see the project."""
    folder = tmp_path_factory.mktemp("apart")
    site = Site(new_lab(hosts=2), project_at(folder / "project"))
    yield site
    assert site.leftovers() == ""


@pytest.fixture(scope="module")
def together(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The hosts have the project, each its own copy."""
    folder = tmp_path_factory.mktemp("together")
    project = project_at(folder / "project")
    site = Site(new_lab(hosts=2, private=(str(project),)), project)
    yield site
    assert site.leftovers() == ""


# --- code


def test_code_that_is_not_there_is_shipped(apart: Site) -> None:
    """To the place that a plan names."""
    words = ("--no-torch", "--master-port", "29873", "tell.py")
    planned, ended = apart.run("--plan", "--json", *words), apart.run(*words)
    assert (planned.code, ended.code) == (0, 0), planned.err + ended.err
    plan, ran = json.loads(planned.out), ended.json("plan.json")
    assert {node["code"] for node in ran["nodes"]} == {"shipped"}
    for rank in range(2):
        said = ended.said(rank)
        assert said["cwd"] == said["path0"] != str(apart.project)
        assert said["file"] == f"{said['cwd']}/tell.py"
    assert all("tell.py" in one.pop("typed")["command"] for one in (plan, ran))
    told, did = (json.dumps(one).replace(one["run_id"], "RUN") for one in (plan, ran))
    assert told == did
    assert f"runs, in a copy of {apart.project}:" in apart.run("--plan", *words).out


def test_a_module_in_a_package_is_shipped(apart: Site) -> None:
    package = apart.project / "pack" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("WORD = 'deep'\n")
    (package / "say.py").write_text("from pack.inner import WORD\nprint(WORD)\n")
    ended = apart.run("--no-torch", "-m", "pack.inner.say")
    assert ended.code == 0, ended.err
    assert ended.lines(1) == ["deep"]


def test_a_script_in_a_subfolder_is_shipped(apart: Site) -> None:
    below = apart.project / "below"
    below.mkdir()
    (below / "helper.py").write_text("WORD = 'beside'\n")
    (below / "main.py").write_text("from helper import WORD\nprint(WORD)\n")
    ended = apart.run("--no-torch", "below/main.py")
    assert ended.code == 0, ended.err
    assert ended.lines(0) == ["beside"]


def test_names_of_any_bytes_are_shipped(apart: Site, tmp_path: Path) -> None:
    project = tmp_path / "odd"
    project.mkdir()
    odd = b"d\xe9j\xe0 'vu' \n.txt"
    with open(bytes(project) + b"/" + odd, "wb") as file:  # noqa: PTH123
        file.write(b"here")
    (project / "ü b.py").write_text("import os\nprint(sorted(map(ascii, os.listdir('.'))))\n")
    ended = apart.run("--no-torch", "ü b.py", cwd=project)
    assert ended.code == 0, ended.err
    assert ended.lines(1)[0].count("vu") == 1
    # what git ignores stays here
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / ".gitignore").write_text("data/\n")
    (project / "data").mkdir()
    (project / "data" / "huge.bin").write_text("x")
    ended = apart.run("--no-torch", "ü b.py", cwd=project)
    assert ended.code == 0, ended.err
    assert ended.lines(1)[0].count("vu") == 1
    assert "data" not in ended.lines(1)[0]


def test_data_are_sent_where_they_lack(apart: Site, tmp_path: Path) -> None:
    """What changed, and nothing else; an argument that means the folder becomes its path there."""
    photos = tmp_path / "photos"
    (photos / "cats").mkdir(parents=True)
    (photos / "cats" / "1.png").write_bytes(b"one")
    (photos / "big.tar").write_bytes(random.Random(1).randbytes(5 << 20))
    script = (
        "import json, os, sys, pathlib as p\n"
        "root = p.Path(os.environ['PACELINE_DATA_DIR'])\n"
        "found = {str(f.relative_to(root)): [f.stat().st_size, f.stat().st_ino]"
        " for f in root.rglob('*') if f.is_file()}\n"
        "print(json.dumps({'root': str(root), 'argv': sys.argv[1:], 'found': found}))\n"
    )
    (tmp_path / "tell_data.py").write_text(script)
    words = ("--no-torch", "--data", str(photos), "tell_data.py", f"--root={photos}")
    first = apart.run(*words, cwd=tmp_path)
    assert first.code == 0, first.err
    assert "sending data: 0 of 11 MiB" in first.err  # to both
    plan = first.json("plan.json")["nodes"]
    for rank in range(2):
        said = first.said(rank)
        assert said["argv"] == [f"--root={said['root']}"]
        assert said["root"].endswith("/photos") != str(photos)
        assert plan[rank]["env"]["PACELINE_DATA_DIR"]["value"] == said["root"]
        assert {name: size for name, (size, _) in said["found"].items()} == {
            "cats/1.png": 3, "big.tar": 5 << 20}  # fmt: skip
    (photos / "cats" / "1.png").unlink()
    (photos / "cats" / "2.png").write_bytes(b"four")
    again = apart.run(*words, cwd=tmp_path)
    assert "sending data: 0 of 1 MiB" in again.err
    for rank in range(2):
        had, has = first.said(rank)["found"], again.said(rank)["found"]
        assert set(has) == {"cats/2.png", "big.tar"}
        assert has["big.tar"] == had["big.tar"]  # the very same file
    (photos / "cats" / "3.png").write_bytes(b"five")
    kept = apart.run("--ship", "never", *words, cwd=tmp_path)
    assert kept.code != 0
    assert "--ship never" in kept.err


def test_weights_are_sent_where_they_lack(apart: Site, tmp_path: Path) -> None:
    """In a file of 20 MB, which is recorded as it was named."""
    network = MODELS["cnn"]((3, 8, 8), 10)
    weights = {**network.state_dict(), "unused": torch.zeros(5_000_000)}
    save_file(weights, tmp_path / "weights.safetensors")
    flags = ["--check=none", "image", "--data=dummy", "--image-size=8", "--global-batch=16",
             "--device=cpu", "--steps=1", "--weights=weights.safetensors"]  # fmt: skip
    argv = apart.argv("--run-dir", "trained", *flags, verb="train")
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    file = str(tmp_path / "weights.safetensors")
    assert f"weights of {file}" in done.stdout + done.stderr
    assert json.loads((tmp_path / "trained/config.json").read_text())["options"]["weights"] == file


def test_shipping_can_be_forbidden(apart: Site) -> None:
    ended = apart.run("--no-torch", "--ship", "never", "tell.py")
    assert ended.code == 1
    assert "n1" in ended.err or "n2" in ended.err
    assert str(apart.project) in ended.err
    assert "--ship" in ended.err
    assert "Traceback" not in ended.err


def test_new_files_come_back(apart: Site) -> None:
    """Those of rank 0 to the paths at which it wrote them, those of others to a folder a host."""
    ended = apart.run("--no-torch", "end.py", "write")
    assert ended.code == 0, ended.err
    for rank, host in enumerate(apart.lab.names):
        files = ended.directory / "files" / host if rank else apart.project
        assert (files / f"result-{rank}.txt").read_text() == f"of {rank}\n"
        assert (files / "out/deep.bin").read_bytes() == bytes(range(256))
    assert not (ended.directory / "files/n2/end.py").exists()
    assert not (ended.directory / "files/n1").exists()
    assert (ended.directory / "kept-0.txt").read_text() == "kept\n"
    for host in apart.lab.names:  # nothing of the run stays there
        jobs = apart.lab.home(host) / ".cache/paceline/jobs"
        assert not jobs.exists() or not list(jobs.iterdir())


@pytest.fixture
def stale(together: Site) -> Iterator[str]:
    """n2 has another version of one file."""
    name = "stale.py"
    (together.project / name).write_text("print('new')\n")
    path = str(together.project / name)
    together.lab.exec("n2", ["sh", "-c", f"echo 'print(\"old\")' > {path}"], check=True)
    yield name
    together.lab.exec("n2", ["rm", path], check=True)
    (together.project / name).unlink()


def test_different_code_is_shipped(together: Site, stale: str) -> None:
    ended = together.run("--no-torch", stale)
    assert ended.code == 0, ended.err
    assert ended.lines(0) == ended.lines(1) == ["new"]
    code = {n["host"]: n["code"] for n in ended.json("plan.json")["nodes"]}
    assert code["n2"] == "shipped"


def test_different_code_is_named_when_nothing_may_be_shipped(together: Site, stale: str) -> None:
    ended = together.run("--no-torch", "--ship", "never", stale)
    assert ended.code == 1
    assert "n2" in ended.err
    assert stale in ended.err
    assert "old" not in ended.out


# --- launchers


def logins(site: Site, host: str) -> int:
    return site.lab.sshd_log(host).read_text().count("Accepted publickey")


@pytest.mark.parametrize("inside", ["n1", "n2"])
def test_the_launcher_is_one_of_the_hosts(together: Site, inside: str) -> None:
    before = {name: logins(together, name) for name in together.lab.names}
    ended = together.run("--no-torch", "tell.py", inside=inside)
    assert ended.code == 0, ended.err
    assert ended.said(1)["cwd"] == str(together.project)
    for rank, host in enumerate(together.lab.names):
        place = ended.said(rank)["place"]
        assert (place["PACELINE_HOST"], place["MASTER_ADDR"]) == (host, "127.0.0.1")
    more = {name: logins(together, name) - before[name] for name in together.lab.names}
    assert more == {name: int(name != inside) for name in together.lab.names}


def test_from_inside_and_outside_the_same_is_planned(together: Site) -> None:
    def essence(plan: Any) -> Any:
        keys = ("host", "address", "interface", "workdir", "python")
        nodes = [{key: node[key] for key in keys} for node in plan["nodes"]]
        return plan["world_size"], plan["master"]["address"], nodes

    plans = [together.run("--plan", "--json", "tell.py", inside=i) for i in (None, "n1")]

    assert plans[0].code == 0, plans[0].err
    outside, inside = (json.loads(plan.out) for plan in plans)
    assert essence(outside) == essence(inside)
    assert {node["code"] for node in outside["nodes"]} == {"verified equal"}


def test_this_machine_alone_needs_no_network(together: Site) -> None:
    ended = together.run("--no-torch", "-p", "2", "tell.py", hosts="localhost", inside="n1")
    assert ended.code == 0, ended.err
    assert ended.said(1)["place"]["MASTER_ADDR"] == "127.0.0.1"


# --- shells that talk


NOISES = {
    "prints": "echo 'Welcome to n2!'; echo noise >&2\n",
    "returns": "echo before; return; echo never\n",
    "binary": "printf '\\365PL1\\000\\000garbage \\365PL1'\n",
    "endless line": "head -c 300000 /dev/zero | tr '\\0' x\n",
}


@contextlib.contextmanager
def start_up_files(site: Site, *texts: str) -> Iterator[None]:
    """Lets the shells of n1 and n2 read these at the login, for a while."""
    files = [site.lab.home(name) / ".bashrc" for name in site.lab.names]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    try:
        yield
    finally:
        for file in files:
            file.unlink()


@pytest.mark.parametrize("noises", [("prints", "binary"), ("returns", "endless line")])
def test_noisy_start_up_files_do_no_harm(together: Site, noises: tuple[str, str]) -> None:
    with start_up_files(together, *map(NOISES.__getitem__, noises)):
        ended = together.run("--no-torch", "tell.py", "x")
    assert ended.code == 0, ended.err
    assert ended.said(1)["argv"] == [b"x".hex()]
    for host in together.lab.names:
        assert f"start-up files of {host}" in ended.err


NO_LOGIN = {
    "exit 3": ["status 3", "exit in ~/.bashrc"],
    "exec sh": ["starts another shell", "case $- in"],
    "read -r a; read -r b": ["reads standard input", "case $- in"],
    "echo This host is for file transfer only; exit 0": ["for file transfer only", "ForceCommand"],
    "export PYTHONHOME=/opt/none": ["PYTHONHOME=/opt/none is set on n2", "--unset PYTHONHOME"],
}


@pytest.mark.parametrize("line", NO_LOGIN)
def test_a_start_up_file_that_keeps_python_from_starting_is_named(
    together: Site, line: str
) -> None:
    with start_up_files(together, "true\n", f"{line}\n"):
        ended = together.run("--no-torch", "tell.py")
    assert ended.code == 1
    for words in ("n2", *NO_LOGIN[line]):
        assert words in ended.err
    assert "Traceback" not in ended.err


def test_start_up_files_may_read_one_line(together: Site) -> None:
    with start_up_files(together, "read -r answer\n", "read -r answer\n"):
        ended = together.run("--no-torch", "tell.py")
    assert ended.code == 0, ended.err


def test_settings_of_the_ssh_config_for_people_do_not_matter(
    together: Site, tmp_path: Path
) -> None:
    for_people = """Host *
  RemoteCommand tmux new -A -s main
  RequestTTY force
  LocalForward 22 localhost:22
  ExitOnForwardFailure yes
  PermitLocalCommand yes
  LocalCommand false
  ControlMaster auto
  ControlPath /nonexistent/%C
  LogLevel QUIET
  VisualHostKey yes
"""
    config = tmp_path / "config"
    config.write_text(for_people + together.lab.ssh_config.read_text())
    ended = together.run("--ssh-config", str(config), "--no-torch", "tell.py")
    assert ended.code == 0, ended.err


def test_one_machine_under_two_names(together: Site) -> None:
    ended = together.run("--no-torch", "tell.py", hosts=f"n1,{together.lab.address('n1')}")
    assert ended.code == 1
    assert "are one machine" in ended.err
    assert "n1 slots=2" in ended.err


def test_other_login_shells() -> None:
    """The one line that travels is read by any shell."""
    from paceline.remote.openssh import agent_command
    from paceline.spec.formatting import shell_text

    line = shell_text(agent_command("/usr/bin/python3"))
    for shell in ("bash", "dash", "csh", "tcsh", "fish", "zsh", "ksh"):
        found = subprocess.run(["sh", "-c", f"command -v {shell}"], capture_output=True)
        if found.returncode == 0:
            done = subprocess.run([shell, "-c", line], input=b"exec('print(\"agent\")')\n",
                                  capture_output=True, timeout=TIMEOUT_S)  # fmt: skip
            assert done.stdout == b"agent\n", (shell, done.stderr)
