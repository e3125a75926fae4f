"""Tests that cached agent code runs only if it is intact and only its user can write it."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.agent.frames import Decoder
from paceline.remote.agent_code import agent_code
from paceline.remote.openssh import agent_command

PYTHON = "/usr/bin/python3"  # all users can execute it
MARK = b"\xf5PLboot "
NOBODY = 65534
PLANTED = "open({!r}, 'w').close()\n"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Creates a folder that other users can enter."""
    path = Path(tempfile.mkdtemp(prefix="paceline-cache-"))
    path.chmod(0o755)
    (path / "tmp").mkdir()
    (path / "tmp").chmod(0o1777)
    yield path
    shutil.rmtree(path)


def users() -> list[int]:
    return [0, NOBODY] if os.getuid() == 0 else [os.getuid()]


def boot_agent(base: Path, folder: Path, user: int) -> str:
    """Starts an agent as this user, ends it, and returns the first word that it sent."""
    code = agent_code()
    argv = agent_command(PYTHON)
    environment = {"XDG_CACHE_HOME": str(base), "TMPDIR": str(folder / "tmp"), "PATH": os.defpath,
                   "HOME": str(folder)}  # fmt: skip
    environment |= {name: os.environ[name] for name in os.environ if name.startswith("PACELINE_T")}
    user_options = {"user": user, "extra_groups": []} if os.getuid() == 0 else {}
    with subprocess.Popen(argv, env=environment, cwd="/", umask=0o002, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, **user_options) as child:  # type: ignore[call-overload]  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(code.first_line)
        child.stdin.flush()
        reply = child.stdout.readline().removeprefix(MARK).decode().strip()
        if reply == "need":
            child.stdin.write(b"%010d" % len(code.archive) + code.archive)
            child.stdin.flush()
        decoder, messages = Decoder(), []
        while not messages:
            data = os.read(child.stdout.fileno(), 1 << 16)
            assert data, child.stderr and child.stderr.read()
            messages += decoder.feed(data)
        assert messages[0][0]["event"] == "hello"
        child.communicate(timeout=60)
    return reply


def cache_of(base: Path) -> Path:
    return base / "paceline" / "agent" / agent_code().digest


@pytest.fixture
def filled_cache(folder: Path) -> Callable[[int], Path]:
    """Returns a function that creates a filled cache of a user."""

    def make(user: int) -> Path:
        base = folder / f"cache{user}"
        code = cache_of(base)
        code.mkdir(parents=True)
        zipfile.ZipFile(io.BytesIO(agent_code().archive)).extractall(code)
        for path in (base, *base.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
            os.chown(path, user, -1)
        return base

    return make


def truncate(code: Path) -> None:
    (code / "paceline_agent/server.py").write_bytes(b"")


def change(code: Path) -> None:
    with (code / "paceline_agent/server.py").open("a") as file:
        file.write(PLANTED.format(str(code.parent / "ran")))


def add_module(code: Path) -> None:
    (code / "json.py").write_text(PLANTED.format(str(code.parent / "ran")))


def add_binary(code: Path) -> None:
    (code / "paceline_agent/surveys/facts.abi3.so").write_bytes(b"\x7fELF")


def remove_file(code: Path) -> None:
    (code / "paceline_agent/surveys/probe.py").unlink()


def empty(code: Path) -> None:
    shutil.rmtree(code)
    code.mkdir(mode=0o700)


def cut_bytecode(code: Path) -> None:
    subprocess.run([PYTHON, "-m", "compileall", "-q", str(code)], check=True)
    (compiled,) = (code / "paceline_agent/__pycache__").glob("server.*.pyc")
    compiled.write_bytes(compiled.read_bytes()[:900])


def make_file(code: Path) -> None:
    shutil.rmtree(code)
    code.write_text("")


def link(code: Path) -> None:
    code.rename(code.with_name("elsewhere"))
    code.symlink_to("elsewhere")


def chmod_777(code: Path) -> None:
    code.chmod(0o777)


@pytest.mark.parametrize("user", users())
def test_intact_cache_is_used(folder: Path, filled_cache: Callable[[int], Path], user: int) -> None:
    base = filled_cache(user)
    assert boot_agent(base, folder, user) == "have"
    assert boot_agent(base, folder, user) == "have"  # also with the bytecode that Python wrote
    assert list((folder / "tmp").iterdir()) == []


def test_partial_bytecode_file_is_not_damage(
    folder: Path, filled_cache: Callable[[int], Path]
) -> None:
    """Another agent that shares the home directory may be compiling at this moment."""
    base = filled_cache(os.getuid())
    code = cache_of(base)
    subprocess.run([PYTHON, "-m", "compileall", "-q", str(code)], check=True)
    (compiled,) = (code / "paceline_agent/__pycache__").glob("server.*.pyc")
    compiled.with_name(f"{compiled.name}.139876543210").write_bytes(compiled.read_bytes()[:900])
    initial = code.stat().st_ino
    assert boot_agent(base, folder, os.getuid()) == "have"
    assert code.stat().st_ino == initial


@pytest.mark.parametrize("broken", [False, True])
def test_concurrent_agents_share_cache(
    folder: Path, filled_cache: Callable[[int], Path], broken: bool
) -> None:
    base = folder / "cache"
    if broken:
        base = filled_cache(os.getuid())
        truncate(cache_of(base))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: boot_agent(base, folder, os.getuid()), range(6)))
    assert [path.name for path in cache_of(base).parent.iterdir()] == [agent_code().digest]
    assert list((folder / "tmp").iterdir()) == []  # used only if the cache cannot be
    assert boot_agent(base, folder, os.getuid()) == "have"


@pytest.mark.parametrize("harm", [truncate, change, add_module, add_binary, remove_file, empty,
                                  cut_bytecode, make_file, link, chmod_777])  # fmt: skip
def test_damaged_cache_is_replaced(folder: Path, filled_cache: Callable[[int], Path],
                              harm: Callable[[Path], None]) -> None:  # fmt: skip
    base = filled_cache(os.getuid())
    code = cache_of(base)
    harm(code)
    assert boot_agent(base, folder, os.getuid()) == "need"
    assert boot_agent(base, folder, os.getuid()) == "have"
    assert not code.is_symlink()
    assert not (code.parent / "ran").exists()
    assert {path.name for path in code.parent.iterdir()} <= {code.name, "elsewhere"}


@pytest.mark.parametrize("user", users())
@pytest.mark.parametrize("opened", ["base", "paceline", "agent"])
def test_world_writable_cache_is_not_used(
    folder: Path, filled_cache: Callable[[int], Path], user: int, opened: str
) -> None:
    base = filled_cache(user)
    code = cache_of(base)
    {"base": base, "paceline": code.parents[1], "agent": code.parent}[opened].chmod(0o777)
    change(code)
    initial = (code / "paceline_agent/server.py").read_bytes()
    assert boot_agent(base, folder, user) == "need"
    assert not (code.parent / "ran").exists()
    assert (code / "paceline_agent/server.py").read_bytes() == initial
    assert list((folder / "tmp").iterdir()) == []  # the temporary copy was removed


@pytest.mark.parametrize("user", users())
def test_cache_of_other_user_is_not_used(
    folder: Path, filled_cache: Callable[[int], Path], user: int
) -> None:
    if os.getuid():
        return  # only root can create files of another user
    base = filled_cache(NOBODY if user == 0 else 0)
    change(cache_of(base))
    for path in (base, *base.rglob("*")):
        path.chmod(0o777)
    assert boot_agent(base, folder, user) == "need"
    assert not (cache_of(base).parent / "ran").exists()


@pytest.mark.parametrize("user", users())
def test_cache_in_shared_folder_is_private(folder: Path, user: int) -> None:
    base = folder / "tmp" / "mine"  # sticky: only the owner can rename or remove it
    assert boot_agent(base, folder, user) == "need"
    assert boot_agent(base, folder, user) == "have"
    assert cache_of(base).stat().st_uid == user
    assert cache_of(base).stat().st_mode & 0o777 == 0o700


def test_agent_starts_if_cache_cannot_be_written(folder: Path) -> None:
    (folder / "file").write_text("")
    assert boot_agent(folder / "file", folder, os.getuid()) == "need"
    assert list((folder / "tmp").iterdir()) == []
