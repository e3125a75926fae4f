"""Tests where code runs (in place, sent, refused) and where launchers run (inside, outside)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import venv
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
def isolated_site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The hosts do not see the project."""
    folder = tmp_path_factory.mktemp("apart")
    site = Site(new_lab(hosts=2), project_at(folder / "project"))
    yield site
    assert site.leftovers() == ""


@pytest.fixture(scope="module")
def synced_site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Each host has a copy of the project."""
    folder = tmp_path_factory.mktemp("together")
    project = project_at(folder / "project")
    site = Site(new_lab(hosts=2, private=(str(project),)), project)
    yield site
    assert site.leftovers() == ""


# --- code


def test_ships_missing_code_as_planned(isolated_site: Site) -> None:
    """The plan names the folder to which the code is sent."""
    words = ("--no-torch", "--master-port", "29873", "tell.py")
    planned, ended = isolated_site.run("--plan", "--json", *words), isolated_site.run(*words)
    assert (planned.code, ended.code) == (0, 0), planned.err + ended.err
    plan, actual_plan = json.loads(planned.out), ended.json("plan.json")
    assert {node["code"] for node in actual_plan["nodes"]} == {"shipped"}
    for rank in range(2):
        report = ended.said(rank)
        assert report["cwd"] == report["path0"] != str(isolated_site.project)
        assert report["file"] == f"{report['cwd']}/tell.py"
    assert all("tell.py" in document.pop("typed")["command"] for document in (plan, actual_plan))
    planned_text, actual_text = (
        json.dumps(document).replace(document["run_id"], "RUN") for document in (plan, actual_plan)
    )
    assert planned_text == actual_text
    assert f"runs, in a copy of {isolated_site.project}:" in isolated_site.run("--plan", *words).out


def test_ships_package_module(isolated_site: Site) -> None:
    package = isolated_site.project / "pack" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("WORD = 'deep'\n")
    (package / "say.py").write_text("from pack.inner import WORD\nprint(WORD)\n")
    ended = isolated_site.run("--no-torch", "-m", "pack.inner.say")
    assert ended.code == 0, ended.err
    assert ended.lines(1) == ["deep"]


def test_sends_training_library_to_hosts_without_it(isolated_site: Site) -> None:
    lab, script = isolated_site.lab, isolated_site.project / "session.py"
    for host in ("n1", "n2"):
        environment = lab.home(host) / "without-paceline"
        venv.create(environment, with_pip=False, symlinks=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "same.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    script.write_text("from paceline import train\nsession = train.join()\nsession.close()\n")
    try:
        python = f"{lab.home_inside()}/without-paceline/bin/python"
        ended = isolated_site.run("--python", python, "session.py")
    finally:
        script.unlink()
    assert ended.code == 0, ended.err


def test_ships_script_in_subfolder(isolated_site: Site) -> None:
    subfolder = isolated_site.project / "below"
    subfolder.mkdir()
    (subfolder / "helper.py").write_text("WORD = 'beside'\n")
    (subfolder / "main.py").write_text("from helper import WORD\nprint(WORD)\n")
    ended = isolated_site.run("--no-torch", "below/main.py")
    assert ended.code == 0, ended.err
    assert ended.lines(0) == ["beside"]


def test_ships_non_utf8_names_but_no_ignored_files(isolated_site: Site, tmp_path: Path) -> None:
    project = tmp_path / "odd"
    project.mkdir()
    raw_name = b"d\xe9j\xe0 'vu' \n.txt"
    with open(bytes(project) + b"/" + raw_name, "wb") as file:  # noqa: PTH123
        file.write(b"here")
    (project / "ü b.py").write_text("import os\nprint(sorted(map(ascii, os.listdir('.'))))\n")
    ended = isolated_site.run("--no-torch", "ü b.py", cwd=project)
    assert ended.code == 0, ended.err
    assert ended.lines(1)[0].count("vu") == 1
    # files that git ignores are not sent
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / ".gitignore").write_text("data/\n")
    (project / "data").mkdir()
    (project / "data" / "huge.bin").write_text("x")
    ended = isolated_site.run("--no-torch", "ü b.py", cwd=project)
    assert ended.code == 0, ended.err
    assert ended.lines(1)[0].count("vu") == 1
    assert "data" not in ended.lines(1)[0]


def test_sends_missing_and_changed_data(isolated_site: Site, tmp_path: Path) -> None:
    """Only changes are sent; an argument that names the folder becomes its path on the hosts."""
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
    first = isolated_site.run(*words, cwd=tmp_path)
    assert first.code == 0, first.err
    assert "sending data: 0 of 11 MiB" in first.err  # to both hosts
    plan = first.json("plan.json")["nodes"]
    for rank in range(2):
        report = first.said(rank)
        assert report["argv"] == [f"--root={report['root']}"]
        assert report["root"].endswith("/photos") != str(photos)
        assert plan[rank]["env"]["PACELINE_DATA_DIR"]["value"] == report["root"]
        assert {name: size for name, (size, _) in report["found"].items()} == {
            "cats/1.png": 3, "big.tar": 5 << 20}  # fmt: skip
    (photos / "cats" / "1.png").unlink()
    (photos / "cats" / "2.png").write_bytes(b"four")
    rerun = isolated_site.run(*words, cwd=tmp_path)
    assert "sending data: 0 of 1 MiB" in rerun.err
    for rank in range(2):
        first_files, second_files = first.said(rank)["found"], rerun.said(rank)["found"]
        assert set(second_files) == {"cats/2.png", "big.tar"}
        assert second_files["big.tar"] == first_files["big.tar"]  # the file was not sent again
    (photos / "cats" / "3.png").write_bytes(b"five")
    without_shipping = isolated_site.run("--ship", "never", *words, cwd=tmp_path)
    assert without_shipping.code != 0
    assert "--ship never" in without_shipping.err


def test_sends_missing_weights(isolated_site: Site, tmp_path: Path) -> None:
    """The file has 20 MB; its name is recorded as it was typed."""
    network = MODELS["cnn"]((3, 8, 8), 10)
    weights = {**network.state_dict(), "unused": torch.zeros(5_000_000)}
    save_file(weights, tmp_path / "weights.safetensors")
    flags = ["--check=none", "image", "--data=dummy", "--image-size=8", "--global-batch=16",
             "--device=cpu", "--steps=1", "--weights=weights.safetensors"]  # fmt: skip
    argv = isolated_site.argv("--run-dir", "trained", *flags, verb="train")
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run(
        argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    file = str(tmp_path / "weights.safetensors")
    assert f"weights of {file}" in result.stdout + result.stderr
    assert json.loads((tmp_path / "trained/config.json").read_text())["options"]["weights"] == file


def test_ship_never_fails_without_code(isolated_site: Site) -> None:
    ended = isolated_site.run("--no-torch", "--ship", "never", "tell.py")
    assert ended.code == 1
    assert "n1" in ended.err or "n2" in ended.err
    assert str(isolated_site.project) in ended.err
    assert "--ship" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("name", ["empty", "ignored"])
def test_runs_in_folder_without_sent_files(isolated_site: Site, tmp_path: Path, name: str) -> None:
    """Its files arrive in it, and all hosts get them at the next start."""
    project = tmp_path / "repo"
    folder = project / "experiments" / name
    folder.mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / ".gitignore").write_text("ignored/\n")
    (project / "count.py").write_text(
        "import json, os, time\nfrom pathlib import Path\n"
        "file = Path('out/state.json')\n"
        "count = json.loads(file.read_text()) if file.exists() else 0\n"
        "print(json.dumps({'count': count}), flush=True)\n"
        "time.sleep(1)\n"  # all ranks have read it
        "if os.environ['RANK'] == '0':\n"
        "    file.parent.mkdir(exist_ok=True)\n    file.write_text(str(count + 1))\n"
    )
    if name == "ignored":
        (folder / "notes.txt").write_text("not sent")
    run_dir = str(tmp_path / "run")
    words = ("--no-torch", "--run-dir", run_dir, "../../count.py")
    plan = isolated_site.run("--plan", *words, cwd=folder)
    assert f"runs, in a copy of {folder}:" in plan.out, plan.err
    for count in range(2):
        ended = isolated_site.run(*words, cwd=folder)
        assert ended.code == 0, ended.err
        assert [ended.said(rank)["count"] for rank in range(2)] == [count, count]
        assert (folder / "out/state.json").read_text() == str(count + 1)


def test_fetches_files_of_program_that_needs_no_code(isolated_site: Site, tmp_path: Path) -> None:
    command = 'mkdir -p out && echo "$RANK" > out/rank.json && pwd'
    plan = isolated_site.run("--plan", "--no-python", "sh", "-c", command, cwd=tmp_path)
    assert f"runs, in a copy of {tmp_path}:" in plan.out, plan.err
    ended = isolated_site.run("--no-python", "sh", "-c", command, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert ended.lines(0)[0].endswith("/code")
    assert (tmp_path / "out/rank.json").read_text() == "0\n"
    assert (ended.directory / "files/n2/out/rank.json").read_text() == "1\n"


@pytest.mark.parametrize("is_on_hosts", [False, True])
def test_refuses_copy_if_current_folder_is_outside_project(
    isolated_site: Site, tmp_path: Path, is_on_hosts: bool
) -> None:
    """What the script writes to a relative path would stay on the host without a word."""
    script = isolated_site.project / "write.py"
    script.write_text("open('result.json', 'w').write('1')\n")
    folder = Path("/var/tmp") if is_on_hosts else tmp_path
    for ended in (isolated_site.run(*words, "--no-torch", str(script), cwd=folder)
                  for words in (("--plan",), ())):  # fmt: skip
        assert ended.code == 1
        assert f"the current folder is {folder}; n1 needs a copy" in ended.err
        assert f"cd {isolated_site.project}, and name the script as write.py" in ended.err
    assert "the script is outside the current folder" in ended.json("result.json")["error"]
    ended = isolated_site.run("--no-torch", "write.py")
    assert (ended.code, (isolated_site.project / "result.json").read_text()) == (0, "1")


def test_fetches_new_files(isolated_site: Site) -> None:
    """Rank 0's files arrive at the paths where it wrote them, others in a folder for each host."""
    ended = isolated_site.run("--no-torch", "end.py", "write")
    assert ended.code == 0, ended.err
    for rank, host in enumerate(isolated_site.lab.names):
        files = ended.directory / "files" / host if rank else isolated_site.project
        assert (files / f"result-{rank}.txt").read_text() == f"of {rank}\n"
        assert (files / "out/deep.bin").read_bytes() == bytes(range(256))
    assert not (ended.directory / "files/n2/end.py").exists()
    assert not (ended.directory / "files/n1").exists()
    assert (ended.directory / "kept-0.txt").read_text() == "kept\n"
    for host in isolated_site.lab.names:  # nothing of the run stays on the hosts
        jobs = isolated_site.lab.home(host) / ".cache/paceline/jobs"
        assert not jobs.exists() or not list(jobs.iterdir())


@pytest.fixture
def stale(synced_site: Site) -> Iterator[str]:
    """Gives n2 another version of one file."""
    name = "stale.py"
    (synced_site.project / name).write_text("print('new')\n")
    path = str(synced_site.project / name)
    synced_site.lab.exec("n2", ["sh", "-c", f"echo 'print(\"old\")' > {path}"], check=True)
    yield name
    synced_site.lab.exec("n2", ["rm", path], check=True)
    (synced_site.project / name).unlink()


def test_ships_changed_code(synced_site: Site, stale: str) -> None:
    ended = synced_site.run("--no-torch", stale)
    assert ended.code == 0, ended.err
    assert ended.lines(0) == ended.lines(1) == ["new"]
    code = {n["host"]: n["code"] for n in ended.json("plan.json")["nodes"]}
    assert code["n2"] == "shipped"


def test_ship_never_names_changed_file(synced_site: Site, stale: str) -> None:
    ended = synced_site.run("--no-torch", "--ship", "never", stale)
    assert ended.code == 1
    assert "n2" in ended.err
    assert stale in ended.err
    assert "old" not in ended.out


# --- launchers


def logins(site: Site, host: str) -> int:
    return site.lab.sshd_log(host).read_text().count("Accepted publickey")


@pytest.mark.parametrize("inside", ["n1", "n2"])
def test_launcher_on_job_host_needs_no_login(synced_site: Site, inside: str) -> None:
    initial_logins = {name: logins(synced_site, name) for name in synced_site.lab.names}
    ended = synced_site.run("--no-torch", "tell.py", inside=inside)
    assert ended.code == 0, ended.err
    assert ended.said(1)["cwd"] == str(synced_site.project)
    for rank, host in enumerate(synced_site.lab.names):
        place = ended.said(rank)["place"]
        assert (place["PACELINE_HOST"], place["MASTER_ADDR"]) == (host, "127.0.0.1")
    new_logins = {
        name: logins(synced_site, name) - initial_logins[name] for name in synced_site.lab.names
    }
    assert new_logins == {name: int(name != inside) for name in synced_site.lab.names}


def test_plan_does_not_depend_on_launching_host(synced_site: Site) -> None:
    def essence(plan: Any) -> Any:
        keys = ("host", "address", "interface", "workdir", "python")
        nodes = [{key: node[key] for key in keys} for node in plan["nodes"]]
        return plan["world_size"], plan["master"]["address"], nodes

    plans = [synced_site.run("--plan", "--json", "tell.py", inside=i) for i in (None, "n1")]

    assert plans[0].code == 0, plans[0].err
    outside, inside = (json.loads(plan.out) for plan in plans)
    assert essence(outside) == essence(inside)
    assert {node["code"] for node in outside["nodes"]} == {"verified equal"}


def test_localhost_needs_no_network(synced_site: Site) -> None:
    ended = synced_site.run("--no-torch", "-p", "2", "tell.py", hosts="localhost", inside="n1")
    assert ended.code == 0, ended.err
    assert ended.said(1)["place"]["MASTER_ADDR"] == "127.0.0.1"


# --- shells that print at login


NOISES = {
    "prints": "echo 'Welcome to n2!'; echo noise >&2\n",
    "returns": "echo before; return; echo never\n",
    "binary": "printf '\\365PL1\\000\\000garbage \\365PL1'\n",
    "endless line": "head -c 300000 /dev/zero | tr '\\0' x\n",
}


@contextlib.contextmanager
def startup_files(site: Site, *texts: str) -> Iterator[None]:
    """Gives the login shells of n1 and n2 start-up files inside the ``with`` block."""
    files = [site.lab.home(name) / ".bashrc" for name in site.lab.names]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    try:
        yield
    finally:
        for file in files:
            file.unlink()


@pytest.mark.parametrize("noises", [("prints", "binary"), ("returns", "endless line")])
def test_ignores_noisy_startup_files(synced_site: Site, noises: tuple[str, str]) -> None:
    with startup_files(synced_site, *map(NOISES.__getitem__, noises)):
        ended = synced_site.run("--no-torch", "tell.py", "x")
    assert ended.code == 0, ended.err
    assert ended.said(1)["argv"] == [b"x".hex()]
    for host in synced_site.lab.names:
        assert f"start-up files of {host}" in ended.err


STARTUP_FAILURES = {
    "exit 3": ["status 3", "exit in ~/.bashrc"],
    "exec sh": ["starts another shell", "case $- in"],
    "read -r a; read -r b": ["reads standard input", "case $- in"],
    "echo This host is for file transfer only; exit 0": ["for file transfer only", "ForceCommand"],
    "export PYTHONHOME=/opt/none": ["PYTHONHOME=/opt/none is set on n2", "--unset PYTHONHOME"],
}


@pytest.mark.parametrize("line", STARTUP_FAILURES)
def test_reports_startup_file_that_blocks_python(synced_site: Site, line: str) -> None:
    with startup_files(synced_site, "true\n", f"{line}\n"):
        ended = synced_site.run("--no-torch", "tell.py")
    assert ended.code == 1
    for words in ("n2", *STARTUP_FAILURES[line]):
        assert words in ended.err
    assert "Traceback" not in ended.err


def test_startup_file_may_read_stdin_line(synced_site: Site) -> None:
    with startup_files(synced_site, "read -r answer\n", "read -r answer\n"):
        ended = synced_site.run("--no-torch", "tell.py")
    assert ended.code == 0, ended.err


def test_ignores_interactive_ssh_config_options(synced_site: Site, tmp_path: Path) -> None:
    interactive_options = """Host *
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
    config.write_text(interactive_options + synced_site.lab.ssh_config.read_text())
    ended = synced_site.run("--ssh-config", str(config), "--no-torch", "tell.py")
    assert ended.code == 0, ended.err


def test_rejects_machine_listed_under_two_names(synced_site: Site) -> None:
    ended = synced_site.run("--no-torch", "tell.py", hosts=f"n1,{synced_site.lab.address('n1')}")
    assert ended.code == 1
    assert "are one machine" in ended.err
    assert "n1 slots=2" in ended.err


def test_agent_command_works_in_login_shells() -> None:
    """Every shell can parse the command that starts an agent."""
    from paceline.remote.openssh import agent_command
    from paceline.spec.formatting import shell_text

    line = "exec " + shell_text(agent_command("/usr/bin/python3"))
    for shell in ("bash", "dash", "csh", "tcsh", "fish", "zsh", "ksh"):
        which = subprocess.run(["sh", "-c", f"command -v {shell}"], capture_output=True)
        if which.returncode == 0:
            result = subprocess.run([shell, "-c", line], input=b"exec('print(\"agent\")')\n",
                                  capture_output=True, timeout=TIMEOUT_S)  # fmt: skip
            assert result.stdout == b"agent\n", (shell, result.stderr)
