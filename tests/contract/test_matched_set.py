"""A set of containers: whatever one file names, the others have."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paceline.cli.verbs.setup.containers import command, parse_workers
from paceline.spec.errors import SettingError

WORDS = ["--worker", "w1=10.0.0.11", "--worker", "w2=10.0.0.12", "--image", "base:1",
         "--iface", "eth0", "--port", "2201", "python", "train.py", "--epochs", "1"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    done = CliRunner().invoke(command, ["--out", str(tmp_path / "set"), *WORDS])
    assert done.exit_code == 0, done.output
    return tmp_path / "set"


def test_ssh_reads_its_config(folder: Path) -> None:
    config = folder / "ssh_launcher" / "config"
    for alias, address, port in (("w1", "10.0.0.11", "2201"), ("w2", "10.0.0.12", "2202")):
        said = subprocess.run(["ssh", "-F", str(config), "-G", alias], capture_output=True,
                              text=True, check=True).stdout.splitlines()  # fmt: skip
        assert f"hostname {address}" in said
        assert f"port {port}" in said
        assert "identityfile /home/dev/.ssh/id_ed25519" in said
        assert "identitiesonly yes" in said


def test_sshd_reads_its_config(folder: Path) -> None:
    for number, alias in enumerate(("w1", "w2")):
        own = folder / f"ssh_worker-{alias}"
        text = (own / "sshd_config").read_text().replace("/home/dev/.ssh", str(own))
        (own / "here").write_text(text)
        done = subprocess.run(["/usr/sbin/sshd", "-t", "-f", str(own / "here")],
                              capture_output=True, text=True, check=False)  # fmt: skip
        # sshd looks for this folder after config and keys, and only as root; the user is not root
        assert done.stderr in ("", "Missing privilege separation directory: /run/sshd\n")
        assert f"Port {2201 + number}" in text


def test_keys_belong_together(folder: Path) -> None:
    public = (folder / "ssh_launcher" / "id_ed25519.pub").read_text().split()[1]
    known = (folder / "ssh_launcher" / "known_hosts").read_text()
    for alias in ("w1", "w2"):
        own = folder / f"ssh_worker-{alias}"
        assert public in (own / "authorized_keys").read_text()
        key = (own / "ssh_host_ed25519_key.pub").read_text().split()[1]
        assert f"{alias} ssh-ed25519 {key}" in known
        assert not (own / "id_ed25519").exists()
        assert (own / "ssh_host_ed25519_key").stat().st_mode & 0o077 == 0
    texts = [p.read_text() for p in folder.rglob("*") if p.is_file() and "key" not in p.name]
    assert not [text for text in texts if "dsa-" in text or "ssh-dss" in text]


def test_every_path_exists_in_the_set(folder: Path) -> None:
    """Mounted folders, the config that sshd is given, the workers that mpirun is given."""
    services = json.loads((folder / "compose.yaml").read_text())["services"]
    assert set(services) == {"w1", "w2", "launcher"}
    for service in services.values():
        for volume in service["volumes"]:
            assert (folder / volume.split(":")[0]).exists()
        assert service["working_dir"] in {v.split(":")[1] for v in service["volumes"]}
    assert services["w1"]["command"][-1] == "/home/dev/.ssh/sshd_config"
    hosts = services["launcher"]["command"]
    assert hosts[hosts.index("-hosts") + 1] == "w1,w2"
    assert services["launcher"]["environment"]["I_MPI_HYDRA_IFACE"] == "eth0"
    assert (folder / "hostfile").read_text().split() == ["w1", "w2"]


def test_the_commands_agree_with_the_compose_file(folder: Path) -> None:
    services = json.loads((folder / "compose.yaml").read_text())["services"]
    lines = (folder / "commands.sh").read_text().splitlines()
    runs = [line for line in lines if line.startswith("docker run")]
    for line, service in zip(runs, services.values(), strict=True):
        # docker before version 23 takes no relative path; the shell puts the folder in
        words = shlex.split(line.replace('"$PWD"', "/a/folder"))
        assert words[words.index(service["image"]) + 1 :] == service["command"]
        mounted = [words[at + 1] for at, word in enumerate(words) if word == "--volume"]
        assert mounted == [f"/a/folder{volume[1:]}" for volume in service["volumes"]]
        given = dict(w.removeprefix("--env=").split("=") for w in words if w.startswith("--env="))
        assert given == service["environment"]
    file = (folder / "Containerfile").read_text()
    uid = os.getuid() or 1000  # whoever writes the set, but root
    assert f"useradd --non-unique --uid {uid} --create-home --home-dir /home/dev dev" in file
    assert re.search(r"^FROM base:1$", file, re.MULTILINE)


def test_a_machine_gets_the_keys_of_its_own_containers_only(tmp_path: Path) -> None:
    """The copy lines as typed, with a stand-in for ssh that unpacks below a folder of the name."""
    machines = tmp_path / "machines"
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nmkdir -p {machines}/$1; cd {machines}/$1 && exec sh -c "$2"\n')
    ssh.chmod(0o755)
    words = [
        "--launcher",
        "10.0.0.9",
        "--worker",
        "w0=10.0.0.9",
        "--worker",
        "w3=10.0.0.12",
        *WORDS,
    ]
    made(tmp_path / "a set", *words)
    lines = (tmp_path / "a set" / "commands.sh").read_text().splitlines()
    for line in (line for line in lines if line.startswith("tar ")):
        env = {"PATH": f"{ssh.parent}:/usr/bin:/bin"}
        subprocess.run(["sh", "-c", line], cwd=tmp_path / "a set", env=env, check=True)
    assert sorted(path.name for path in machines.iterdir()) == ["10.0.0.11", "10.0.0.12"]
    common = {"Containerfile", "rank.sh", "sshd.sh", "workload"}
    for address, folders in (
        ("10.0.0.11", {"ssh_worker-w1"}),
        ("10.0.0.12", {"ssh_worker-w2", "ssh_worker-w3"}),
    ):
        bundle = machines / address / "a set"
        assert {path.name for path in bundle.iterdir()} == common | folders
        keys = [path for path in bundle.rglob("*") if "PRIVATE KEY" in _text(path)]
        assert {path.parent.name for path in keys} == folders
        assert all(path.stat().st_mode & 0o077 == 0 for path in keys)


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def test_compose_asks_the_machine_for_its_group_ids(tmp_path: Path) -> None:
    service = made(tmp_path, "--gpus", "intel", *WORDS)["services"]["w1"]
    assert [group.split(":")[0] for group in service["group_add"]] == [
        "${VIDEO_GROUP_ID", "${RENDER_GROUP_ID",
    ]  # fmt: skip
    getent = tmp_path / "bin" / "getent"
    getent.parent.mkdir()
    getent.write_text("#!/bin/sh\necho render:x:992:me; echo video:x:39:\n")
    getent.chmod(0o755)
    lines = (tmp_path / "commands.sh").read_text().splitlines()
    (line,) = [line for line in lines if line.endswith(">.env")]
    env = {"PATH": f"{getent.parent}:/usr/bin:/bin"}
    subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, check=True)
    found = (tmp_path / ".env").read_text().split()
    assert found == ["RENDER_GROUP_ID=992", "VIDEO_GROUP_ID=39"]


def test_a_base_that_has_the_user_gives_it_your_uid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, containers and the user's home all belong to one uid, and it is found by name."""
    monkeypatch.setattr("os.getuid", lambda: 1234)
    monkeypatch.setattr("paceline.setup.container_set._change_owner", lambda uid, out: None)
    service = made(tmp_path, *WORDS)["services"]["w1"]
    assert service["user"] == "1234"
    _, _, run = (tmp_path / "Containerfile").read_text().partition("\nRUN ")
    run = run.partition("\nUSER ")[0].replace("\\\n", " ")
    subprocess.run(["sh", "-n", "-c", run], check=True)
    words = " ".join(run.split())
    there, _, lacking = words.partition("if id -u dev ")[2].partition("; else ")
    assert there.endswith("then usermod --non-unique --uid 1234 --home /home/dev dev")
    assert lacking.startswith("useradd --non-unique --uid 1234 --create-home --home-dir /home/dev")
    assert "chown 1234 /home/dev && install -d -o 1234 -m 700 /home/dev/.ssh" in lacking


def test_a_second_call_keeps_the_keys(folder: Path) -> None:
    before = (folder / "ssh_launcher" / "id_ed25519").read_bytes()
    assert CliRunner().invoke(command, ["--out", str(folder), *WORDS]).exit_code == 0
    assert (folder / "ssh_launcher" / "id_ed25519").read_bytes() == before


def test_ranks_meet_on_the_machine_of_rank_0(folder: Path, tmp_path: Path) -> None:
    services = json.loads((folder / "compose.yaml").read_text())["services"]
    assert services["launcher"]["environment"]["MASTER_ADDR"] == "10.0.0.11"
    words = ["--launcher", "10.0.0.9", "--master-port", "5", "-p", "2", "--env", "A=b c", *WORDS]
    other = made(tmp_path / "other", *words)["services"]["launcher"]
    env = other["environment"]
    assert [env[n] for n in ("MASTER_ADDR", "MASTER_PORT", "A")] == ["10.0.0.9", "5", "b c"]
    command = other["command"]
    assert command[command.index("-hosts") + 1] == "localhost,w1,w2"
    assert command[command.index("-ppn") + 1 :][:3] == ["2", "-n", "6"]
    assert (tmp_path / "other" / "hostfile").read_text().split() == ["localhost", "w1", "w2"]


def made(out: Path, *words: str) -> Any:
    done = CliRunner().invoke(command, ["--out", str(out), *words])
    assert done.exit_code == 0, done.output
    return json.loads((out / "compose.yaml").read_text())


def test_compose_puts_no_variables_in(tmp_path: Path) -> None:
    words = ["--env", "A=$b", *WORDS[: WORDS.index("python")], "sh", "-c", "echo $RANK"]
    launcher = made(tmp_path, *words)["services"]["launcher"]
    assert launcher["environment"]["A"] == "$$b"
    assert launcher["command"][-1] == "echo $$RANK"
    assert "'echo $RANK'" in (tmp_path / "commands.sh").read_text()


def test_open_mpi_is_told_what_it_passes_on(tmp_path: Path) -> None:
    words = ["--mpi", "openmpi", "--launcher", "10.0.0.9", "--env", "A=1", *WORDS]
    found = made(tmp_path, *words)["services"]["launcher"]["command"]
    assert found[:2] == ["/opt/paceline/rank", "mpirun"]
    assert found[found.index("--host") + 1] == "localhost:1,w1:1,w2:1"
    passed = {after for word, after in itertools.pairwise(found) if word == "-x"}
    assert {"MASTER_ADDR", "MASTER_PORT", "A", "GLOO_SOCKET_IFNAME"} <= passed
    assert found[-5:] == ["/opt/paceline/rank", "python", "train.py", "--epochs", "1"]


@pytest.mark.parametrize(
    ("gpus", "flags", "key"),
    [
        ("intel", ["--device=/dev/dri", "/dev/dri/by-path:/dev/dri/by-path:ro"], "group_add"),
        ("amd", ["--device=/dev/kfd", "--device=/dev/dri"], "group_add"),
        ("nvidia", ["--gpus=all"], "deploy"),
        ("cdi", ["--device=nvidia.com/gpu=all"], "devices"),
    ],
)
def test_gpus_of_each_maker(gpus: str, flags: list[str], key: str, tmp_path: Path) -> None:
    services = made(tmp_path, "--gpus", gpus, *WORDS)["services"]
    assert all(key in service for service in services.values())
    lines = (tmp_path / "commands.sh").read_text().splitlines()
    runs = [line for line in lines if line.startswith("docker run")]
    assert len(runs) == 3
    for line in runs:
        assert all(flag in line for flag in flags)
        assert ("$(getent group render video" in line) == (key == "group_add")


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
         "3 4 1 2 3 1"),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
          "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "3 4 1 2 3 1"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "1 2 0 1 1 0"),
        ({"RANK": "7"}, "7"),
    ],
)  # fmt: skip
def test_a_rank_finds_its_place_whoever_started_it(
    told: dict[str, str], place: str, folder: Path, tmp_path: Path
) -> None:
    names = "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $PMI_RANK $MPI_LOCALRANKID"
    argv = [str(folder / "rank.sh"), "sh", "-c", f"echo {names}"]
    done = subprocess.run(argv, env={"PATH": "/usr/bin:/bin", **told}, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert done.stdout.split() == place.split()


def test_logins_get_the_containers_environment(folder: Path) -> None:
    """One SetEnv in sshd's own quoting; a value that it could not read back is left out."""
    script = (folder / "sshd.sh").read_text().replace("exec /usr/sbin/sshd", "printf '%s\\n'")
    env = {"PATH": "/opt/mpi/bin:/usr/bin", "A": "b c", "B": 'x"y', "C": "one\ntwo", "HOME": "/"}
    done = subprocess.run(["sh", "-c", script, "sshd", "-f", "file"], env=env,
                          capture_output=True, text=True, check=True)  # fmt: skip
    *words, told = done.stdout.splitlines()
    assert words == ["-D", "-e", "-f", "file", "-o"]
    assert sorted(shlex.split(told)) == ["A=b c", "C=one", "PATH=/opt/mpi/bin:/usr/bin", "SetEnv"]


def test_scripts_are_sourced_once_and_without_the_commands_words(tmp_path: Path) -> None:
    script = tmp_path / "set vars.sh"
    script.write_text('export SEEN="${SEEN}x$#"\n')
    made(tmp_path / "set", "--activate", str(script), *WORDS)
    rank = str(tmp_path / "set" / "rank.sh")
    argv = [rank, rank, "sh", "-c", "echo $SEEN"]  # mpirun within it, and a rank within that
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "x0\n"
    script.write_text("echo no card >&2; return 3\n")
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "no card\n")


@pytest.mark.parametrize("words", [("--activate", "vars.sh"), ("--mount", "a:/b"),
                                   ("--mount", "/a"), ("--env", "RANK=1")])  # fmt: skip
def test_what_cannot_be_is_refused(words: tuple[str, str], tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["--out", str(tmp_path), *words, *WORDS])
    assert isinstance(done.exception, SettingError)


@pytest.mark.parametrize("given", [("w1",), ("=a",), ("w1=",), ("w1=a", "w1=b"), ("launcher=a",)])
def test_workers_that_cannot_be(given: tuple[str, ...]) -> None:
    with pytest.raises(SettingError, match="cannot be"):
        parse_workers(given)
