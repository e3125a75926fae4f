"""Tests that the files of a set of containers are consistent with each other."""

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

ARGUMENTS = ["--worker", "w1=10.0.0.11", "--worker", "w2=10.0.0.12", "--image", "base:1",
         "--iface", "eth0", "--port", "2201", "python", "train.py", "--epochs", "1"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    result = CliRunner().invoke(command, ["--out", str(tmp_path / "set"), *ARGUMENTS])
    assert result.exit_code == 0, result.output
    return tmp_path / "set"


def test_ssh_config_is_valid(folder: Path) -> None:
    config = folder / "ssh_launcher" / "config"
    for alias, address, port in (("w1", "10.0.0.11", "2201"), ("w2", "10.0.0.12", "2202")):
        ssh_settings = subprocess.run(["ssh", "-F", str(config), "-G", alias], capture_output=True,
                              text=True, check=True).stdout.splitlines()  # fmt: skip
        assert f"hostname {address}" in ssh_settings
        assert f"port {port}" in ssh_settings
        assert "identityfile /home/dev/.ssh/id_ed25519" in ssh_settings
        assert "identitiesonly yes" in ssh_settings


def test_sshd_config_is_valid(folder: Path) -> None:
    for number, alias in enumerate(("w1", "w2")):
        worker_folder = folder / f"ssh_worker-{alias}"
        text = (
            (worker_folder / "sshd_config")
            .read_text()
            .replace("/home/dev/.ssh", str(worker_folder))
        )
        (worker_folder / "here").write_text(text)
        result = subprocess.run(["/usr/sbin/sshd", "-t", "-f", str(worker_folder / "here")],
                              capture_output=True, text=True, check=False)  # fmt: skip
        # sshd looks for this folder last, and only root needs it; the user is not root
        assert result.stderr in ("", "Missing privilege separation directory: /run/sshd\n")
        assert f"Port {2201 + number}" in text


def test_keys_match(folder: Path) -> None:
    public = (folder / "ssh_launcher" / "id_ed25519.pub").read_text().split()[1]
    known_hosts = (folder / "ssh_launcher" / "known_hosts").read_text()
    for alias in ("w1", "w2"):
        worker_folder = folder / f"ssh_worker-{alias}"
        assert public in (worker_folder / "authorized_keys").read_text()
        key = (worker_folder / "ssh_host_ed25519_key.pub").read_text().split()[1]
        assert f"{alias} ssh-ed25519 {key}" in known_hosts
        assert not (worker_folder / "id_ed25519").exists()
        assert (worker_folder / "ssh_host_ed25519_key").stat().st_mode & 0o077 == 0
    texts = [p.read_text() for p in folder.rglob("*") if p.is_file() and "key" not in p.name]
    assert not [text for text in texts if "dsa-" in text or "ssh-dss" in text]


def test_compose_paths_exist(folder: Path) -> None:
    """Covers mounted folders, the configuration of sshd, and the workers of mpirun."""
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


def test_commands_match_compose_file(folder: Path) -> None:
    services = json.loads((folder / "compose.yaml").read_text())["services"]
    lines = (folder / "commands.sh").read_text().splitlines()
    runs = [line for line in lines if line.startswith("docker run")]
    for line, service in zip(runs, services.values(), strict=True):
        # docker before version 23 requires absolute paths; the shell inserts the folder
        arguments = shlex.split(line.replace('"$PWD"', "/a/folder"))
        assert arguments[arguments.index(service["image"]) + 1 :] == service["command"]
        mounted = [
            arguments[position + 1]
            for position, argument in enumerate(arguments)
            if argument == "--volume"
        ]
        assert mounted == [f"/a/folder{volume[1:]}" for volume in service["volumes"]]
        settings = dict(
            w.removeprefix("--env=").split("=") for w in arguments if w.startswith("--env=")
        )
        assert settings == service["environment"]
    file = (folder / "Containerfile").read_text()
    uid = os.getuid() or 1000  # the uid of the user who writes the set, unless it is root
    assert f"useradd --non-unique --uid {uid} --create-home --home-dir /home/dev dev" in file
    assert re.search(r"^FROM base:1$", file, re.MULTILINE)


def test_copies_only_keys_of_machine(tmp_path: Path) -> None:
    """Runs the copy commands with a stand-in for ssh that unpacks into one folder per machine."""
    machines = tmp_path / "machines"
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nmkdir -p {machines}/$1; cd {machines}/$1 && exec sh -c "$2"\n')
    ssh.chmod(0o755)
    arguments = [
        "--launcher",
        "10.0.0.9",
        "--worker",
        "w0=10.0.0.9",
        "--worker",
        "w3=10.0.0.12",
        *ARGUMENTS,
    ]
    make_set(tmp_path / "a set", *arguments)
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


def test_compose_reads_group_ids_from_machine(tmp_path: Path) -> None:
    service = make_set(tmp_path, "--gpus", "intel", *ARGUMENTS)["services"]["w1"]
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
    entries = (tmp_path / ".env").read_text().split()
    assert entries == ["RENDER_GROUP_ID=992", "VIDEO_GROUP_ID=39"]


def test_image_user_gets_uid_of_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, containers and the home directory have one uid; the user is found by name."""
    monkeypatch.setattr("os.getuid", lambda: 1234)
    monkeypatch.setattr("paceline.setup.container_set._change_owner", lambda uid, out: None)
    service = make_set(tmp_path, *ARGUMENTS)["services"]["w1"]
    assert service["user"] == "1234"
    _, _, run = (tmp_path / "Containerfile").read_text().partition("\nRUN ")
    run = run.partition("\nUSER ")[0].replace("\\\n", " ")
    subprocess.run(["sh", "-n", "-c", run], check=True)
    arguments = " ".join(run.split())
    if_present, _, if_absent = arguments.partition("if id -u dev ")[2].partition("; else ")
    assert if_present.endswith("then usermod --non-unique --uid 1234 --home /home/dev dev")
    assert if_absent.startswith(
        "useradd --non-unique --uid 1234 --create-home --home-dir /home/dev"
    )
    assert "chown 1234 /home/dev && install -d -o 1234 -m 700 /home/dev/.ssh" in if_absent


def test_rerun_preserves_keys(folder: Path) -> None:
    first_key = (folder / "ssh_launcher" / "id_ed25519").read_bytes()
    assert CliRunner().invoke(command, ["--out", str(folder), *ARGUMENTS]).exit_code == 0
    assert (folder / "ssh_launcher" / "id_ed25519").read_bytes() == first_key


def test_master_address_is_machine_of_rank_0(folder: Path, tmp_path: Path) -> None:
    services = json.loads((folder / "compose.yaml").read_text())["services"]
    assert services["launcher"]["environment"]["MASTER_ADDR"] == "10.0.0.11"
    arguments = [
        "--launcher",
        "10.0.0.9",
        "--master-port",
        "5",
        "-p",
        "2",
        "--env",
        "A=b c",
        *ARGUMENTS,
    ]
    variant = make_set(tmp_path / "other", *arguments)["services"]["launcher"]
    env = variant["environment"]
    assert [env[n] for n in ("MASTER_ADDR", "MASTER_PORT", "A")] == ["10.0.0.9", "5", "b c"]
    command = variant["command"]
    assert command[command.index("-hosts") + 1] == "localhost,w1,w2"
    assert command[command.index("-ppn") + 1 :][:3] == ["2", "-n", "6"]
    assert (tmp_path / "other" / "hostfile").read_text().split() == ["localhost", "w1", "w2"]


def make_set(out: Path, *arguments: str) -> Any:
    result = CliRunner().invoke(command, ["--out", str(out), *arguments])
    assert result.exit_code == 0, result.output
    return json.loads((out / "compose.yaml").read_text())


def test_compose_escapes_dollar_signs(tmp_path: Path) -> None:
    arguments = ["--env", "A=$b", *ARGUMENTS[: ARGUMENTS.index("python")], "sh", "-c", "echo $RANK"]
    launcher = make_set(tmp_path, *arguments)["services"]["launcher"]
    assert launcher["environment"]["A"] == "$$b"
    assert launcher["command"][-1] == "echo $$RANK"
    assert "'echo $RANK'" in (tmp_path / "commands.sh").read_text()


def test_open_mpi_exports_variables(tmp_path: Path) -> None:
    arguments = ["--mpi", "openmpi", "--launcher", "10.0.0.9", "--env", "A=1", *ARGUMENTS]
    entries = make_set(tmp_path, *arguments)["services"]["launcher"]["command"]
    assert entries[:2] == ["/opt/paceline/rank", "mpirun"]
    assert entries[entries.index("--host") + 1] == "localhost:1,w1:1,w2:1"
    passed = {following for argument, following in itertools.pairwise(entries) if argument == "-x"}
    assert {"MASTER_ADDR", "MASTER_PORT", "A", "GLOO_SOCKET_IFNAME"} <= passed
    assert entries[-5:] == ["/opt/paceline/rank", "python", "train.py", "--epochs", "1"]


@pytest.mark.parametrize(
    ("gpus", "flags", "key"),
    [
        ("intel", ["--device=/dev/dri", "/dev/dri/by-path:/dev/dri/by-path:ro"], "group_add"),
        ("amd", ["--device=/dev/kfd", "--device=/dev/dri"], "group_add"),
        ("nvidia", ["--gpus=all"], "deploy"),
        ("cdi", ["--device=nvidia.com/gpu=all"], "devices"),
    ],
)
def test_gpu_flags_by_vendor(gpus: str, flags: list[str], key: str, tmp_path: Path) -> None:
    services = make_set(tmp_path, "--gpus", gpus, *ARGUMENTS)["services"]
    assert all(key in service for service in services.values())
    lines = (tmp_path / "commands.sh").read_text().splitlines()
    runs = [line for line in lines if line.startswith("docker run")]
    assert len(runs) == 3
    for line in runs:
        assert all(flag in line for flag in flags)
        assert ("$(getent group render video" in line) == (key == "group_add")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
         "3 4 1 2 3 1"),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
          "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "3 4 1 2 3 1"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "1 2 0 1 1 0"),
        ({"RANK": "7"}, "7"),
    ],
)  # fmt: skip
def test_rank_script_maps_launcher_variables(
    environment: dict[str, str], expected: str, folder: Path, tmp_path: Path
) -> None:
    names = "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $PMI_RANK $MPI_LOCALRANKID"
    argv = [str(folder / "rank.sh"), "sh", "-c", f"echo {names}"]
    result = subprocess.run(argv, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert result.stdout.split() == expected.split()


def test_logins_get_container_environment(folder: Path) -> None:
    """One SetEnv with sshd's quoting; values that sshd cannot read back are left out."""
    script = (folder / "sshd.sh").read_text().replace("exec /usr/sbin/sshd", "printf '%s\\n'")
    env = {"PATH": "/opt/mpi/bin:/usr/bin", "A": "b c", "B": 'x"y', "C": "one\ntwo", "HOME": "/"}
    result = subprocess.run(["sh", "-c", script, "sshd", "-f", "file"], env=env,
                          capture_output=True, text=True, check=True)  # fmt: skip
    *arguments, environment = result.stdout.splitlines()
    assert arguments == ["-D", "-e", "-f", "file", "-o"]
    assert sorted(shlex.split(environment)) == [
        "A=b c",
        "C=one",
        "PATH=/opt/mpi/bin:/usr/bin",
        "SetEnv",
    ]


def test_activation_scripts_run_once_without_arguments(tmp_path: Path) -> None:
    script = tmp_path / "set vars.sh"
    script.write_text('export SEEN="${SEEN}x$#"\n')
    make_set(tmp_path / "set", "--activate", str(script), *ARGUMENTS)
    rank = str(tmp_path / "set" / "rank.sh")
    argv = [rank, rank, "sh", "-c", "echo $SEEN"]  # as mpirun in the container, which starts a rank
    result = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert result.stdout == "x0\n"
    script.write_text("echo no card >&2; return 3\n")
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (3, "no card\n")


@pytest.mark.parametrize("arguments", [("--activate", "vars.sh"), ("--mount", "a:/b"),
                                   ("--mount", "/a"), ("--env", "RANK=1")])  # fmt: skip
def test_rejects_invalid_options(arguments: tuple[str, str], tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--out", str(tmp_path), *arguments, *ARGUMENTS])
    assert isinstance(result.exception, SettingError)


@pytest.mark.parametrize(
    "settings", [("w1",), ("=a",), ("w1=",), ("w1=a", "w1=b"), ("launcher=a",)]
)
def test_rejects_invalid_workers(settings: tuple[str, ...]) -> None:
    with pytest.raises(SettingError, match="cannot be"):
        parse_workers(settings)


def test_interface_search_imports_nothing_from_workload(tmp_path: Path) -> None:
    out, workload = tmp_path / "set", tmp_path / "workload"
    words = ["--worker", "w1=10.0.0.11", "--image", "base:1", "--launcher", "127.0.0.1"]
    assert CliRunner().invoke(command, ["--out", str(out), *words]).exit_code == 0
    texts = [path.read_text() for path in out.iterdir() if path.is_file()]
    (search,) = re.findall(r'card=\$\(.*?"\$own"\)', "\n".join(texts), re.DOTALL)
    workload.mkdir()
    (workload / "socket.py").write_text("raise SystemExit('imported')\n")
    script = f'own=127.0.0.1\n{search}\necho "$card"\n'
    printed = subprocess.run(["sh"], input=script, cwd=workload, check=True, capture_output=True,
                             text=True)  # fmt: skip
    assert (printed.stdout, printed.stderr) == ("lo\n", "")


def test_copied_set_is_writable_by_nobody_else(folder: Path, tmp_path: Path) -> None:
    """The login on the other machine has the umask 000."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "ssh").write_text(f'#!/bin/sh\numask 000; cd {home}; exec /bin/sh -c "$2"\n')
    (tmp_path / "ssh").chmod(0o755)
    lines = (folder / "commands.sh").read_text().splitlines()
    copy_line = next(line for line in lines if line.startswith("tar ") and "10.0.0.12" in line)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", copy_line], cwd=folder, env=env, check=True)
    (copied,) = home.iterdir()
    assert (copied / "Containerfile").is_file()
    assert not copied.stat().st_mode & 0o022
