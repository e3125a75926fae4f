"""The entry of a job: from the script of the command line, and what its text shows."""

from __future__ import annotations

import contextlib
import itertools
import re
from pathlib import Path

from paceline.agent.ranks.master_address import spawns_and_names_master
from paceline.launch.planning.imports import imported_files, imports_paceline
from paceline.spec.errors import SettingError
from paceline.spec.formatting import closest_match, shell_text
from paceline.spec.job import Entry


def entry_of(script: str, args: tuple[str, ...], *, module: bool = False,
             no_python: bool = False) -> Entry:  # fmt: skip
    """Returns what every rank runs; SettingError if there is no such script."""
    if module and no_python:
        raise SettingError("--module and --no-python cannot be combined")
    if no_python:
        if re.fullmatch(r"[^/]+\.py", script) and Path(script).is_file():
            raise SettingError(
                f"--no-python looks for a program {script} on the PATH",
                found=f"a script in this folder, {script}",
                remedy=f"Leave it out: {shell_text(['paceline', 'run', script, *args])}\n"
                f"or, if the script names its interpreter: --no-python ./{script}",
            )
        return Entry("binary", script, args)
    if module:
        return Entry("module", script, args)
    path = Path(script)
    if args and re.fullmatch(r"python[\d.]*", path.name):
        target = shell_text(_python_target(args))
        raise SettingError(
            f"{script} is not a script, and the ranks run with Python anyway",
            remedy=f"Leave it out: paceline run {target} (--python PATH names another Python)",
        )
    if args and path.name == "torchrun" and not path.exists():
        raise SettingError(
            f"{script} is not a script, and paceline run starts the ranks itself",
            remedy=f"Leave it out: {shell_text(['paceline', 'run', *args])}",
        )
    if path.is_dir() and not (path / "__main__.py").exists():
        scripts = _scripts(path)
        raise SettingError(
            f"{script} is a folder, not a script",
            found="it has no __main__.py" + ("" if scripts else ", and no scripts"),
            remedy=f"Name a script in it: {path / scripts[0]}" if scripts else "Name a script",
        )
    if not path.exists():
        raise SettingError(
            f"there is no script {script}",
            found=f"nothing at {path.absolute()}",
            remedy=_suggestion(path, args),
        )
    if not path.is_file() and not path.is_dir():
        raise SettingError(
            f"{script} is not a regular file",
            found="a pipe or a device, which ranks cannot read again",
            remedy="Save the script in a file, and name the file",
        )
    if path.suffix == ".ipynb":
        raise SettingError(
            f"{script} is a notebook, and ranks run scripts",
            remedy="Save its code as a script, and run that: "
            + shell_text(["jupyter", "nbconvert", "--to", "script", script]),
        )
    if program := _foreign_program(path):
        raise SettingError(
            f"{script} is {program[0]}, and the ranks run with Python",
            remedy=f"Run it as a program: {shell_text(['paceline', 'run', *program[1], *args])}",
        )
    return Entry("script", script, args)


def _foreign_program(path: Path) -> tuple[str, list[str]] | None:
    """Describes a file that Python cannot run, and how to run it; ``None`` for other files."""
    if not path.is_file() or path.suffix in (".py", ".pyz"):
        return None
    try:
        with path.open("rb") as file:
            head = file.read(200)
    except OSError:
        return None  # the ranks may be able to read it
    name = str(path) if "/" in str(path) else f"./{path}"
    if head.startswith(b"\x7fELF"):
        return "a compiled program", ["--no-python", name]
    first = head.partition(b"\n")[0]
    if path.suffix in (".sh", ".bash") or re.match(rb"#!.*\b(ba|da|z|k)?sh\b", first):
        return "a shell script", ["--no-python", "bash", str(path)]
    return None


def inner_launcher(entry: Entry) -> str:
    """Returns the launcher that a program, or a script in its arguments, starts; empty for none."""
    words = [entry.target, *(word for arg in entry.args for word in (arg, *arg.split()))]
    texts = [*words, *(_text_of(Path(word)) for word in words)]
    starts = (_INNER_LAUNCHER.search(text) for text in texts)
    return next((match[1] for match in starts if match), "")


def _text_of(path: Path) -> str:
    """The beginning of a shell script; empty for other files."""
    try:
        if not path.is_file() or path.suffix == ".py":
            return ""
        with path.open("rb") as file:
            return file.read(64 << 10).decode("latin-1")
    except (OSError, ValueError):
        return ""


def local_rank_flag(script: str) -> str:
    """Returns how a script spells the option for its local rank.

    ``torch.distributed.launch`` passes ``--local-rank``, its older versions and DeepSpeed
    ``--local_rank``.
    """
    try:
        text = Path(script).read_bytes()
    except OSError:
        return "--local_rank"
    is_hyphenated = b"--local-rank" in text and b"--local_rank" not in text
    return "--local-rank" if is_hyphenated else "--local_rank"


def entry_argv(entry: Entry, python: str, local_rank: int | str = "LOCAL_RANK") -> list[str]:
    """Returns the command that is equivalent to a rank."""
    flag = [f"{entry.local_rank_flag}={local_rank}"] if entry.local_rank_flag else []
    if entry.kind == "binary":
        return [entry.target, *flag, *entry.args]
    if entry.kind == "function":
        return [python, entry.target]
    module = ["-m"] if entry.kind == "module" else []
    return [python, *module, entry.target, *flag, *entry.args]


def opens_store(entry: Entry) -> bool:
    """Returns whether the script's processes may open a store of their own.

    A script that reads the address of rank 0's host without the port, or adds to the port, means a
    port of its own on that host.
    """
    source = _source_of(entry)
    reads_address_only = b"MASTER_ADDR" in source and b"MASTER_PORT" not in source
    return reads_address_only or bool(_OTHER_PORT.search(source)) or spawns_and_names_master(source)


def mentions(entry: Entry, variable: str) -> bool:
    """Returns whether the text of the script contains the name of a variable."""
    return variable.encode() in _source_of(entry)


def preload_of(entry: Entry) -> tuple[str, ...]:
    """Returns what a node imports before it forks the ranks.

    A process's first optimizer makes torch import its compiler, which takes longer than the rest of
    torch's start; forked ranks inherit it. With ``paceline.train`` only what compiles imports it.
    Empty for a script without it that sets a variable which torch reads when it is imported.
    """
    text = _source_of(entry)
    if _uses_paceline(_source_path(entry)):
        compiles = re.search(_COMPILES, text, re.MULTILINE)
        return ("torch", "paceline.train?", *((COMPILER,) if compiles else ()))
    if _SETS_IMPORT_VARIABLE.search(text):
        return ()
    if re.search(rb"^[^#\n]*\boptim\b", text, re.MULTILINE):
        return ("torch", COMPILER)
    return ("torch",)


def _uses_paceline(path: Path | None) -> bool:
    """Whether a file imports ``paceline``, itself or through modules of its project."""
    if path is None or imports_paceline(path):
        return path is not None
    files = itertools.islice(imported_files(path, Path.cwd()), MAX_IMPORTED_FILES)
    return any(map(imports_paceline, files))


MAX_IMPORTED_FILES = 300  # that are read for this at each start
_INNER_LAUNCHER = re.compile(
    r"^[^#\n]*?(?<![\w./-])"
    r"(torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed)(?![\w./-])",
    re.MULTILINE,
)
_SETS_IMPORT_VARIABLE = re.compile(
    rb"^[^#\n]*\b(?:environ\[|environ\.setdefault\(|putenv\()\s*[\"'](?:(?:OMP|MKL|KMP|GOMP|OPENBLAS"
    rb"|NUMEXPR|ATEN|PYTORCH|TORCHDYNAMO|TORCHINDUCTOR)_\w+|TORCH_(?:DISTRIBUTED_DEBUG|LOGS|TRACE"
    rb"|CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES))[\"']\s*(?:\]\s*=[^=]|,)",
    re.MULTILINE,
)
_OTHER_PORT = re.compile(rb"""MASTER_PORT["'][^\n]{0,20}[\])]\s*[+-]\s*\w""")
COMPILER = "torch._dynamo?"
COMPRESSION = "paceline.train.ddp.scripts"  # acts on scripts with --communication
# a call, an argument, a decorator or an import; the words alone stand in many a text
_COMPILES = (
    rb"^[^#\n]*(?:(?<!\bre\.)\b(?:compile|shard|fully_shard)\s*(?:\(|=(?!=))"
    rb"|@[\w.]*\bcompile\b|\bimport\b.*\b(?:compile|fully_shard)\b)"
)


def _source_of(entry: Entry) -> bytes:
    """Returns the text of a script or a module in the current folder, or nothing."""
    path = _source_path(entry)
    with contextlib.suppress(OSError):
        return path.read_bytes() if path else b""
    return b""


def _source_path(entry: Entry) -> Path | None:
    """Returns the file of a script or of a module in the current folder, if it is of Python."""
    names = [entry.target] if entry.kind == "script" else []
    if entry.kind == "module":
        path = entry.target.replace(".", "/")
        names = [f"{path}/__main__.py", f"{path}.py"]
    return next((Path(name) for name in names if name.endswith(".py") and Path(name).is_file()),
                None)  # fmt: skip


def _python_target(args: tuple[str, ...]) -> list[str]:
    """Returns the script, or -m and the module, that Python would run with these arguments."""
    words = [*args]
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        del words[: 2 if words[0] in ("-W", "-X") else 1]
    if not words or words[0] == "-c":
        return ["SCRIPT"]
    return words[: 2 if words[0] == "-m" else 1]


def _scripts(folder: Path) -> list[str]:
    """Returns the names of scripts in a folder; ``__init__.py`` is none."""
    names = {path.name for path in folder.glob("*.py")} if folder.is_dir() else set()
    return sorted(names - {"__init__.py"})


def _suggestion(path: Path, args: tuple[str, ...]) -> str:
    script = next((arg for arg in args if arg.endswith(".py") and Path(arg).is_file()), None)
    if script and not path.suffix:  # -H n1 n2 train.py
        return f"If {path} is a host, join the hosts with a comma: -H HOST,{path} {script}"
    if match := closest_match(path.name, _scripts(path.parent)):
        return f"Did you mean {path.parent / match}?"
    return "For a module add -m, for a program that is not Python --no-python"
