"""Tests that what a rule of ``paceline explain`` says to type can be typed.

All texts to type in Confirm and Remedy sections are in backticks. Each belongs to one kind with its
own check: Paceline's command lines and settings by Paceline's parsers, shell commands in a sandbox
or by the program's help, Python by signatures, environment variables by the code that reads them.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from test_remedies import text_of
from torch.distributed.algorithms import Join

import paceline.train
from each_case import each_case
from paceline.cli import program
from paceline.explain.rules import load_all
from paceline.hosts.source import load_toml
from paceline.recipes import RECIPES, parse_options
from paceline.spec import rundir
from paceline.spec.errors import PacelineError
from paceline.train import Session, fit_batch

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
SPAN = re.compile(r"`([^`]+)`")
VARIABLE = re.compile(r"\$?([A-Z][A-Z0-9_]*_[A-Z0-9_]+|RANK)(?:=\S*)?")
UNQUOTED_COMMAND = re.compile(
    r"(?<![\w-])--?[a-z][\w-]*|\b[A-Z]+_[A-Z_]+\b|\bpaceline [a-z]+\b|\bsudo\b"
)

# values for placeholders
VALUES = {
    "ADDRESS": "127.0.0.1", "DEVICE": "sda", "FILE": "./file", "FOLDER": "./folder", "GID": "0",
    "HOST": "localhost", "HOSTS": "localhost", "ID": "job", "IMAGE": "image", "JOB": "1",
    "MODULE": "json", "N": "1", "NAME": "lo", "NODE": "n1", "PATH": "./folder", "PID": "1",
    "POD": "pod", "PORT": "29500", "PYTHON": "python", "RUN": "./folder", "SCRIPT": "./script",
    "SERVER": "server", "SHARE": "share", "USER": "root", "X": "0.1", "eth0": "lo",
}  # fmt: skip
# programs that are harmless in the sandbox
SAFE_PROGRAMS = {
    "case", "cat", "curl", "date", "df", "dmesg", "du", "echo", "export", "findmnt", "free",
    "getent", "grep", "head", "id", "ip", "journalctl", "kill", "last", "ldconfig", "ldd", "ls",
    "mpirun", "printenv", "ps", "python", "sha256sum", "ss", "ssh", "ssh-add", "sudo chown",
    "sudo dmesg", "sudo mount", "sudo umount", "taskset", "ulimit", "uptime", "which",
}  # fmt: skip
# programs whose options are looked up → the command that lists them
HELP_COMMANDS = {
    "accelerate launch": "accelerate launch --help", "docker pull": "docker pull --help",
    "docker run": "docker run --help",
    "hf": "hf auth --help", "kubectl describe": "kubectl describe --help",
    "kubectl get": "kubectl get --help", "kubectl logs": "kubectl logs --help",
    "pip": "pip install --help", "rdma": "rdma help", "salloc": "salloc --help",
    "sbatch": "sbatch --help", "scontrol": "scontrol --help", "sacctmgr": "sacctmgr --help",
    "setsid": "setsid --help", "nohup": "nohup --help", "sinfo": "sinfo --help",
    "squeue": "squeue --help", "srun": "srun --help", "ssh-keygen": "ssh-keygen -?",
    "sudo apt-get": "apt-get --help", "sudo systemctl": "systemctl --help",
    "sudo update-ca-certificates": "update-ca-certificates --help",
    "systemctl": "systemctl --help", "torchrun": "torchrun --help",
}  # fmt: skip
# programs that cannot be tested, and the reason
UNTESTABLE = {
    "compute-sanitizer": "part of NVIDIA's CUDA toolkit", "conda": "not a package of the system",
    "ethtool": "needs a network card", "fi_info": "part of libfabric",
    "git": "needs git-lfs", "ib_write_bw": "needs an RDMA card", "ibstat": "needs an RDMA card",
    "lfs": "needs Lustre", "module": "a function of the cluster's shell",
    "mount.cifs": "needs a CIFS server", "nc": "differs between three packages",
    "nv-fabricmanager": "needs NVSwitch", "nvidia-smi": "needs NVIDIA's driver",
    "ping": "needs a raw socket", "py-spy": "not a package of the system",
    "quota": "needs a disk with quotas", "rsync": "not installed everywhere",
    "sacct": "needs a database of accounts", "show_gids": "needs Mellanox's OFED",
    "smbclient": "needs a CIFS server",
    "sudo modprobe": "needs NVIDIA's modules", "sudo nvidia-smi": "needs NVIDIA's driver",
    "sudo smartctl": "needs a disk", "ucx_info": "part of UCX",
}  # fmt: skip
# words of other programs' files and interfaces, by their documentation
DOCUMENTED_TERMS = {
    "DeepSpeed's configuration": {'"auto"', "train_batch_size"},
    "torch": {'"ccl"', '"cuda"', '"cuda:0"', "drop_last=True", "device=x.device", "tensor.device"},
    "limits.conf(5)": {"* - memlock unlimited", "* - nofile 65536", "* - nproc 65536"},
    "systemd.exec(5), systemd.resource-control(5)": {"LimitMEMLOCK=infinity", "TasksMax=infinity"},
    "logind.conf(5)": {"KillUserProcesses"},
    "ssh_config(5), sshd_config(5)": {"User", "IdentityFile", "MaxStartups"},
    "Kubernetes' pods": {"resources.requests", "ephemeral-storage", "nvidia.com/gpu"},
    "control groups": {"memory.events", "memory.max"},
    "Transformers": {'attn_implementation="sdpa"', "config.json", "resize_token_embeddings"},
    "Lightning": {"devices=1"},
    "oneCCL": {"setvars.sh", "$I_MPI_ROOT/opt/mpi/libfabric/lib/prov",
               "import oneccl_bindings_for_pytorch"},
    "keys of a model that DistributedDataParallel wraps": {"module."},
    "host files": {"slots=N", "HOST:N"},
    "places": {"lib*.so", "pkg/train.py", "~/.bashrc", "~/.cache", "~/.cache/huggingface",
               "~/.ssh/config", "/dev/infiniband", "/dev/shm", "/etc/hosts",
               "/etc/security/limits.conf", "/tmp/ray/session_latest/logs",
               "/usr/local/share/ca-certificates/NAME.crt"},
}  # fmt: skip
OWN_FILES = {rundir.EVENTS, rundir.RESULT, rundir.PLAN, "paceline.toml"}
OWN_SETTINGS = {'interface = "eth0"', "[hosts.NAME]", "python"}
# options of other programs that occur without the program
FOREIGN = {"--gpus-per-task": "srun", "--gpu-bind": "srun", "-np": "mpirun"}
# variables, by the installed package that reads them
READ_BY = {
    "torch": {"CUDA_HOME", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "LOCAL_RANK",
              "MASTER_ADDR",
              "MASTER_PORT", "MAX_JOBS", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF",
              "PYTORCH_ROCM_ARCH", "RANK", "TORCHINDUCTOR_CACHE_DIR", "TORCH_CUDA_ARCH_LIST",
              "TORCH_DISTRIBUTED_DEBUG", "TORCH_EXTENSIONS_DIR", "TP_SOCKET_IFNAME",
              "TRITON_CACHE_DIR", "WORLD_SIZE", "CUDA_LAUNCH_BLOCKING", "NCCL_DEBUG",
              "NCCL_SOCKET_IFNAME"},
    "huggingface_hub": {"HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN"},
    "httpx": {"SSL_CERT_FILE", "https_proxy"},
    "requests": {"REQUESTS_CA_BUNDLE"},
    "paceline": {"PACELINE_DATA_DIR", "XDG_CACHE_HOME"},
}  # fmt: skip
DOCUMENTED = {
    "Python": {"PYTHONBREAKPOINT", "PYTHONFAULTHANDLER", "TMPDIR"},
    "ld.so(8)": {"LD_LIBRARY_PATH"},
    "NCCL's environment variables": {"NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA",
                                     "NCCL_IB_TIMEOUT", "NCCL_NET", "NCCL_P2P_DISABLE"},
    "HIP": {"HIP_LAUNCH_BLOCKING", "AMD_LOG_LEVEL", "HSA_OVERRIDE_GFX_VERSION"},
    "libfabric": {"FI_PROVIDER", "FI_PROVIDER_PATH", "FI_LOG_LEVEL"},
    "oneCCL": {"CCL_ATL_TRANSPORT", "CCL_WORKER_AFFINITY", "CCL_WORKER_COUNT"},
    "Intel MPI": {"I_MPI_PORT_RANGE", "I_MPI_ROOT"},
    "Open MPI": {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"},
    "OpenBLAS": {"OPENBLAS_NUM_THREADS"},
    "Triton": {"TRITON_PTXAS_PATH"},
    "UCX": {"UCX_NET_DEVICES", "UCX_TLS"},
    "Weights & Biases": {"WANDB_API_KEY", "WANDB_MODE"},
    "DeepSpeed": {"DS_BUILD_OPS"},
    "vLLM": {"VLLM_HOST_IP"},
    "an example": {"ANSWER"},
}  # fmt: skip
_PYTHON: dict[str, Any] = {
    "torch": torch, "os": os, "int": int, "session": Session, "Session": Session,
    "fit_batch": fit_batch, "limit": inspect.signature(Session.loader).parameters["limit"],
    "ignore_index": inspect.signature(torch.nn.CrossEntropyLoss).parameters["ignore_index"],
    "DataLoader": torch.utils.data.DataLoader, "Join": Join,
    "DistributedSampler": torch.utils.data.DistributedSampler,
    "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
    "init_process_group": torch.distributed.init_process_group,
    "copy": copy, "timedelta": timedelta, "paceline": paceline.train and paceline,
}  # fmt: skip
USAGE_ERROR = re.compile(
    r"(?i)invalid option|unrecognized option|unknown (?:option|command|flag)|\busage:|syntax error"
    r"|command not found|Object \S+ is unknown|requires an argument|bad option"
)


def _texts() -> Iterator[tuple[str, str]]:
    """Yields Confirm and Remedy of all rules, and strings with backticks in their modules."""
    for rule in load_all():
        yield rule.code, f"{rule.sections['Confirm']}\n\n{rule.sections['Remedy']}"
    for path in sorted((SOURCE / "explain" / "rules").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        parts = {part for node in joined for part in node.values}
        strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        for text in map(text_of, [*joined, *(node for node in strings if node not in parts)]):
            if "`" in text and "``" not in text:
                yield path.stem, text.replace("X", "N")


TEXTS = list(_texts())
SPANS = sorted({span for _, text in TEXTS for span in SPAN.findall(text)} - {"N"})


def kind_of(span: str) -> str:
    """Returns the kind of check for a text in backticks."""
    if span in set().union(*DOCUMENTED_TERMS.values()):
        return "word"
    if span in OWN_FILES | OWN_SETTINGS:
        return "own"
    if re.match(r"paceline(?: |$)", span):
        return "command"
    if span.startswith("-"):
        return "foreign" if span in FOREIGN else "option"
    if VARIABLE.fullmatch(span):
        return "variable"
    return "shell" if _programs(span) else "python"


def _programs(span: str) -> list[tuple[str, list[str]]]:
    """Returns the programs of a shell command with arguments; empty if one is unknown."""
    try:
        tokens = shlex.split(span.replace("$(", " ; ").replace(")", " ; "))
    except ValueError:
        return []
    commands: list[list[str]] = [[]]
    for argument in tokens:
        if argument.strip(";") == "" or argument in ("|", "&&", ";;"):
            commands.append([])
        elif commands[-1] or not re.match(r"[A-Z_]+=", argument):
            commands[-1].append(argument.rstrip(";"))
    entries = []
    for command in filter(None, commands):
        name = command[0]
        for known in (" ".join(command[:2]), name):
            if known in SAFE_PROGRAMS | HELP_COMMANDS.keys() | UNTESTABLE.keys():
                entries.append((known, command[len(known.split()) :]))
                break
        else:
            if entries or name == "PYTHON":
                entries.append(("python" if name == "PYTHON" else "echo", command[1:]))
            else:
                return []
    return entries


def of_kind(kind: str) -> list[str]:
    return [span for span in SPANS if kind_of(span) == kind]


def with_sample_values(span: str) -> str:
    """Replaces the placeholders in a text by values."""
    names = "|".join(sorted(VALUES, key=len, reverse=True))
    return re.sub(rf"(?<![$\w-])(?:{names})(?![\w-])", lambda match: VALUES[match[0]], span)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder" / "a").mkdir(parents=True)
    (tmp_path / "folder" / "b").mkdir()
    for name in ("file", "script"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)


def test_span_kinds_are_covered() -> None:
    assert len(SPANS) > 350
    assert {kind_of(span) for span in SPANS} == {
        "word", "own", "command", "option", "foreign", "variable", "shell", "python",
    }  # fmt: skip


@each_case(("code", "text"), TEXTS, ids=str)
def test_commands_are_in_backticks(code: str, text: str) -> None:
    assert UNQUOTED_COMMAND.findall(SPAN.sub("", text)) == []


@each_case("span", of_kind("command"))
def test_commands_are_parsed(span: str) -> None:
    parse(shlex.split(with_sample_values(span))[1:])


@each_case("span", of_kind("option"))
def test_options_are_parsed(span: str) -> None:
    """Options without a command must belong to a run or a recipe."""
    is_of_recipe = any(has_option(("train", name), span) for name in RECIPES)
    assert is_of_recipe or has_option(("run",), span)


@each_case(("code", "text"), TEXTS, ids=str)
def test_options_of_recipes_are_for_recipes(code: str, text: str) -> None:
    """Who runs a script cannot type them, so that the same sentence names recipes."""
    for sentence in re.split(r"[.;] ", text):
        if not re.search(r"\brecipe\b|`paceline train", sentence):
            options = [span for span in SPAN.findall(sentence) if kind_of(span) == "option"]
            assert all(has_option(("run",), span) for span in options), sentence


@cache
def has_option(command: tuple[str, ...], span: str) -> bool:
    """Returns whether a command takes an option, as it is written or with a value."""
    tokens = shlex.split(with_sample_values(span))
    for given in (tokens, [*tokens, "1"]) if len(tokens) == 1 else (tokens,):
        try:
            parse([*command, *given, *(["script"] if command == ("run",) else [])])
        except (click.UsageError, PacelineError, SystemExit):
            continue
        return True
    return False


def parse(tokens: Sequence[str]) -> None:
    """Parses a command line as Paceline does, without running it."""
    command: click.Command = program
    arguments, context = list(tokens), click.Context(program)
    with CliRunner().isolation(env={"COLUMNS": "200"}):
        while isinstance(command, click.Group) and arguments:
            inner = command.get_command(context, arguments[0])
            if inner is None:
                break
            command, arguments = inner, arguments[1:]
        if not arguments or (command is program):
            assert command is not program, f"no verb {tokens}"
            return
        context = command.make_context(tokens[0], arguments)
        if tokens[0] == "train":
            recipe_arguments = [
                argument
                for argument in context.params["options"]
                if argument != context.params["chosen"]
            ]
            parse_options(context.params["chosen"], recipe_arguments)


@each_case("span", of_kind("own"))
def test_settings_are_read(span: str) -> None:
    if span in OWN_SETTINGS:
        path = Path("paceline.toml")
        path.write_text('[hosts.n1]\ninterface = "eth0"\npython = "/opt/python"\n')
        assert load_toml(path)["hosts"]["n1"].keys() == {"interface", "python"}


@each_case("span", of_kind("python"))
def test_python_names_and_arguments_exist(span: str) -> None:
    for node in ast.walk(ast.parse(span)):
        if isinstance(node, ast.Call) and node.keywords:
            names = {keyword.arg for keyword in node.keywords}
            called = _resolve(node.func)
            assert called is timedelta or names <= inspect.signature(called).parameters.keys(), span
        elif isinstance(node, ast.Attribute | ast.Name):
            _resolve(node)


def _resolve(node: ast.expr) -> Any:
    """Returns the object of an expression; ``None`` for a variable of the user's script."""
    if isinstance(node, ast.Attribute):
        value = _resolve(node.value)
        return None if value is None else getattr(value, node.attr)
    assert isinstance(node, ast.Name)
    if node.id in ("data", "model", "optimizer", "device", "FILE", "NAME"):
        return None
    return _PYTHON[node.id]


def test_variables_are_documented() -> None:
    given = {name for span in SPANS for name in re.findall(r"--(?:env|unset) (\w+)", span)}
    standalone = {match[1] for span in SPANS if (match := VARIABLE.match(span))}
    known = set().union(*READ_BY.values(), *DOCUMENTED.values())
    assert (given | standalone) - known == set()


@each_case(("package", "names"), READ_BY.items(), ids=str)
def test_packages_read_their_variables(package: str, names: set[str]) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"no {package} here")
    folders = [str(folder) for folder in spec.submodule_search_locations or ()]
    patterns = [argument for name in names for argument in ("-e", name)]
    grep = ["grep", "-rohaF", "--include=*.py", "--include=*.so", *patterns, *folders]
    entries = subprocess.run(grep, capture_output=True, text=True).stdout.split()
    assert names - set(entries) - {"https_proxy"} == set()


def test_tables_have_no_stale_entries() -> None:
    used = {name for span in of_kind("shell") for name, _ in _programs(span)}
    assert (SAFE_PROGRAMS | HELP_COMMANDS.keys() | UNTESTABLE.keys()) - used == set()
    assert set().union(*DOCUMENTED_TERMS.values()) - set(SPANS) == set()
    assert UNTESTABLE.keys() & (SAFE_PROGRAMS | HELP_COMMANDS.keys()) == set()


@each_case("span", of_kind("foreign"))
def test_foreign_options_exist(span: str) -> None:
    if shutil.which(FOREIGN[span]):
        assert span in help_of(HELP_COMMANDS.get(FOREIGN[span], "mpirun --help"))


@each_case("span", of_kind("shell"))
def test_shell_command_options_exist(span: str) -> None:
    syntax = subprocess.run(
        ["bash", "-nc", with_sample_values(span)], capture_output=True, text=True
    )
    assert syntax.returncode == 0, syntax.stderr
    for name, arguments in _programs(span):
        if name in HELP_COMMANDS and shutil.which(HELP_COMMANDS[name].split()[0]):
            text = help_of(HELP_COMMANDS[name])
            for argument in arguments:
                assert not argument.startswith("-") or _is_option(argument, text), (
                    f"{argument}: {text}"
                )


def _is_option(argument: str, text: str) -> bool:
    name = argument.partition("=")[0]
    if name.startswith("--"):
        return re.search(rf"{re.escape(name)}(?![\w-])", text) is not None
    return all(re.search(rf"(?<!\w)-\w*{letter}", text) for letter in name[1:])


@cache
def help_of(command: str) -> str:
    """Returns the output of a command that prints help."""
    result = subprocess.run(shlex.split(command), capture_output=True, text=True, env=environment())
    return result.stdout + result.stderr


def environment() -> dict[str, str]:
    """Returns an environment for the sandbox, without the user's variables."""
    slurm = Path("slurm.conf")
    slurm.write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
        "HOME": str(Path.cwd()), "USER": "root", "MASTER_ADDR": "localhost", "LC_ALL": "C",
        "SLURM_CONF": str(slurm.resolve()), "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "COLUMNS": "200",
    }  # fmt: skip


SANDBOX = """
ip link set lo up
mount -t tmpfs x /dev/shm && mount -t tmpfs -o noexec x /mnt && cd /mnt
mkdir -p folder/a .triton .cache && mount -t tmpfs -o ro x folder && mkdir -p sys
printf 'print(1)\\n' > script && date > file && export HOME=/mnt
sudo() { "$@"; }
"""
TORCH_CODE = re.compile(r"""python -c ["'](import torch.*)["']""")
# paths in the text of one command → paths that exist
SANDBOX_PATHS = {"/tmp": "/mnt", "./folder/*": "/mnt/*"}


@cache
def can_make_namespaces() -> bool:
    argv = ["unshare", "-mnip", "--fork", "true"]
    return subprocess.run(argv, capture_output=True).returncode == 0


def run_in_sandbox(command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with its own network, mounts and processes."""
    argv = ["unshare", "-mnip", "--fork", "bash", "-c", f"{SANDBOX}\n{command}"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment())


@each_case("span", [span for span in of_kind("shell")
                    if all(name in SAFE_PROGRAMS for name, _ in _programs(span))])  # fmt: skip
def test_shell_commands_run(span: str) -> None:
    """Programs must accept their arguments; results in the sandbox do not matter."""
    command = with_sample_values(span)
    if code := TORCH_CODE.fullmatch(command):
        exec(code[1], {})  # in this process, which has imported torch
        return
    if not can_make_namespaces():
        pytest.skip("no namespaces can be made here")
    if not all(shutil.which(name.split()[-1]) or name in ("case", "export", "ulimit")
               for name, _ in _programs(span)):  # fmt: skip
        return
    for text, replacement in SANDBOX_PATHS.items():
        command = command.replace(text, replacement)
    if command.startswith("case"):
        command = f"f() {{ {command}; }}; f"
    result = run_in_sandbox(
        command.replace("./script", "python ./script" if "mpirun" in span else "./script")
    )
    assert not USAGE_ERROR.search(result.stderr), f"{command}: {result.stderr}"
    assert result.returncode != 127, f"{command}: {result.stderr}"
