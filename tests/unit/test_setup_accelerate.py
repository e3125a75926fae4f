"""Tests the files for ``accelerate launch``, as Accelerate 1.15 reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline.setup import accelerate
from paceline.setup.accelerate import Machine, commands, distributed_type, files, machine
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host

# from accelerate/commands/config/config_args.py, which refuses unknown keys
CONFIG_KEYS = {
    "compute_environment", "debug", "distributed_type", "downcast_bf16", "enable_cpu_affinity",
    "machine_rank", "main_process_ip", "main_process_port", "main_training_function",
    "mixed_precision", "num_machines", "num_processes", "rdzv_backend", "same_network", "use_cpu",
}  # fmt: skip


def two_machines(*makers: str, processes: int | None = None) -> list[Machine]:
    return [machine(Host(name), makers, 8, processes, "eth0") for name in ("n1", "n2")]


@pytest.mark.parametrize(
    ("machines", "kind", "use_cpu", "total"),
    [
        (two_machines("nvidia", "nvidia"), "MULTI_GPU", False, 4),
        (two_machines("amd"), "MULTI_GPU", False, 2),
        (two_machines("intel", "intel", processes=1), "MULTI_XPU", False, 2),
        (two_machines(), "MULTI_GPU", True, 2),  # works without GPUs, see the comment in the file
        ([machine(Host("n1"), (), 8, None, "")], "NO", True, 1),
        ([machine(Host("n1", slots=2), (), 8, None, "")], "MULTI_GPU", True, 2),
    ],
)
def test_config_file_per_machine(
    machines: list[Machine], kind: str, use_cpu: bool, total: int
) -> None:
    texts = files(machines, "10.0.0.1", 29501, "bf16")
    for rank, node in enumerate(machines):
        said = yaml.safe_load(texts[node.host.name])
        assert said.keys() == CONFIG_KEYS
        assert said["machine_rank"] == rank
        assert (said["distributed_type"], said["use_cpu"]) == (kind, use_cpu)
        assert (said["num_machines"], said["num_processes"]) == (len(machines), total)
        assert (said["main_process_ip"], said["main_process_port"]) == ("10.0.0.1", 29501)
        assert said["mixed_precision"] == "bf16"


def test_precision_no_is_string() -> None:
    said = yaml.safe_load(files(two_machines(), "10.0.0.1", 29500, "no")["n1"])
    assert (said["mixed_precision"], said["downcast_bf16"]) == ("no", "no")
    single_config = yaml.safe_load(files(two_machines()[:1], "127.0.0.1", 29500, "no")["n1"])
    assert single_config["distributed_type"] == "NO"


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        ([*two_machines("nvidia")[:1], *two_machines()[1:]], "n2: no GPU"),
        ([machine(Host(f"n{at}"), ["nvidia"] * at, 8, None, "") for at in (1, 2)], "n1 1, n2 2"),
    ],
)  # fmt: skip
def test_rejects_unsupported_machines(machines: list[Machine], said: str) -> None:
    with pytest.raises(SettingError) as excinfo:
        distributed_type(machines)
    assert said in excinfo.value.found


def test_processes_option_follows_torchrun() -> None:
    gpus = machine(Host("n1"), ["nvidia"] * 4, 8, "auto", "")
    cpus = machine(Host("n1"), ["nvidia"] * 4, 8, "cpu", "")
    assert (gpus.processes, cpus.processes) == (4, 8)
    assert machine(Host("n1"), (), 8, "auto", "").processes == 8
    with pytest.raises(SettingError, match="no GPU"):
        machine(Host("n1"), (), 8, "gpu", "")


def test_commands_set_interface() -> None:
    assert commands(two_machines("nvidia"), {"n1": "n1.yaml", "n2": "n2.yaml"})[1] == (
        "# on n2:\nNCCL_SOCKET_IFNAME=eth0 accelerate launch --config_file n2.yaml SCRIPT"
    )
    assert commands(two_machines(), {"n1": "", "n2": ""})[0].endswith(
        "GLOO_SOCKET_IFNAME=eth0 accelerate launch SCRIPT"
    )


def install(home: Path, text: str, umask: int = 0o022) -> Path:
    """Runs the script as on a host and returns the file."""
    program = accelerate.INSTALL.format(text=repr(text))
    completed = subprocess.run(
        [sys.executable, "-I", "-"], input=program, check=True, capture_output=True, text=True,
        env={"HF_HOME": str(home)}, umask=umask,
    )  # fmt: skip
    return Path(completed.stdout.strip())


def test_install_script_backs_up_existing_file(tmp_path: Path) -> None:
    for text in ("one: 1\n", "one: 1\n", "two: {'a': \"b\"}\n"):
        file = install(tmp_path, text)
        assert file == tmp_path / "accelerate" / "default_config.yaml"
        assert file.read_text() == text
    assert file.with_name(f"{file.name}.before-paceline").read_text() == "one: 1\n"


def test_install_script_lets_nobody_else_write(tmp_path: Path) -> None:
    home, foreign = tmp_path / "home" / "huggingface", tmp_path / "foreign"
    file = install(home, "one: 1\n", umask=0)
    for path in (file, file.parent, home, home.parent):
        assert not path.stat().st_mode & 0o022, path
    foreign.write_text("theirs")
    file.with_name(f"{file.name}.new").symlink_to(foreign)
    assert install(home, "two: 2\n").read_text() == "two: 2\n"
    assert foreign.read_text() == "theirs"
