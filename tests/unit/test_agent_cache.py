"""Code in the agent's cache: run only if it is ours alone and what the launcher tells."""

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

PYTHON = "/usr/bin/python3"  # any user may run it
MARK = b"\xf5PLboot "
NOBODY = 65534
PLANTED = "open({!r}, 'w').close()\n"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can reach."""
    path = Path(tempfile.mkdtemp(prefix="paceline-cache-"))
    path.chmod(0o755)
    (path / "tmp").mkdir()
    (path / "tmp").chmod(0o1777)
    yield path
    shutil.rmtree(path)


def users() -> list[int]:
    return [0, NOBODY] if os.getuid() == 0 else [os.getuid()]


def boot(base: Path, folder: Path, user: int) -> str:
    """Starts an agent as ``user`` and ends it; the word that it said first."""
    code = agent_code()
    argv = agent_command(PYTHON)
    environment = {"XDG_CACHE_HOME": str(base), "TMPDIR": str(folder / "tmp"), "PATH": os.defpath,
                   "HOME": str(folder)}  # fmt: skip
    environment |= {name: os.environ[name] for name in os.environ if name.startswith("PACELINE_T")}
    more = {"user": user, "extra_groups": []} if os.getuid() == 0 else {}
    with subprocess.Popen(argv, env=environment, cwd="/", umask=0o002, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more) as child:  # type: ignore[call-overload]  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(code.first_line)
        child.stdin.flush()
        word = child.stdout.readline().removeprefix(MARK).decode().strip()
        if word == "need":
            child.stdin.write(b"%010d" % len(code.archive) + code.archive)
            child.stdin.flush()
        decoder, said = Decoder(), []
        while not said:
            data = os.read(child.stdout.fileno(), 1 << 16)
            assert data, child.stderr and child.stderr.read()
            said += decoder.feed(data)
        assert said[0][0]["event"] == "hello"
        child.communicate(timeout=60)
    return word


def cache_of(base: Path) -> Path:
    return base / "paceline" / "agent" / agent_code().digest


@pytest.fixture
def own(folder: Path) -> Callable[[int], Path]:
    """A cache for each user, already filled."""

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


def remove_one(code: Path) -> None:
    (code / "paceline_agent/surveys/probe.py").unlink()


def empty(code: Path) -> None:
    shutil.rmtree(code)
    code.mkdir(mode=0o700)


def cut_compiled(code: Path) -> None:
    subprocess.run([PYTHON, "-m", "compileall", "-q", str(code)], check=True)
    (compiled,) = (code / "paceline_agent/__pycache__").glob("server.*.pyc")
    compiled.write_bytes(compiled.read_bytes()[:900])


def make_file(code: Path) -> None:
    shutil.rmtree(code)
    code.write_text("")


def link(code: Path) -> None:
    code.rename(code.with_name("elsewhere"))
    code.symlink_to("elsewhere")


def open_up(code: Path) -> None:
    code.chmod(0o777)


@pytest.mark.parametrize("user", users())
def test_a_sound_cache_is_used(folder: Path, own: Callable[[int], Path], user: int) -> None:
    base = own(user)
    assert boot(base, folder, user) == "have"
    assert boot(base, folder, user) == "have"  # with what Python compiled, too
    assert list((folder / "tmp").iterdir()) == []


def test_what_another_agent_compiles_at_this_moment_is_no_damage(
    folder: Path, own: Callable[[int], Path]
) -> None:
    """Agents of several hosts with one home directory start at the same time."""
    base = own(os.getuid())
    code = cache_of(base)
    subprocess.run([PYTHON, "-m", "compileall", "-q", str(code)], check=True)
    (compiled,) = (code / "paceline_agent/__pycache__").glob("server.*.pyc")
    compiled.with_name(f"{compiled.name}.139876543210").write_bytes(compiled.read_bytes()[:900])
    before = code.stat().st_ino
    assert boot(base, folder, os.getuid()) == "have"
    assert code.stat().st_ino == before


@pytest.mark.parametrize("broken", [False, True])
def test_agents_that_start_at_once_fill_one_cache(
    folder: Path, own: Callable[[int], Path], broken: bool
) -> None:
    base = folder / "cache"
    if broken:
        base = own(os.getuid())
        truncate(cache_of(base))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: boot(base, folder, os.getuid()), range(6)))
    assert [path.name for path in cache_of(base).parent.iterdir()] == [agent_code().digest]
    assert list((folder / "tmp").iterdir()) == []  # where it is kept if it cannot be in the cache
    assert boot(base, folder, os.getuid()) == "have"


@pytest.mark.parametrize("harm", [truncate, change, add_module, add_binary, remove_one, empty,
                                  cut_compiled, make_file, link, open_up])  # fmt: skip
def test_a_broken_cache_heals(folder: Path, own: Callable[[int], Path],
                              harm: Callable[[Path], None]) -> None:  # fmt: skip
    base = own(os.getuid())
    code = cache_of(base)
    harm(code)
    assert boot(base, folder, os.getuid()) == "need"
    assert boot(base, folder, os.getuid()) == "have"
    assert not code.is_symlink()
    assert not (code.parent / "ran").exists()
    assert {path.name for path in code.parent.iterdir()} <= {code.name, "elsewhere"}


@pytest.mark.parametrize("user", users())
@pytest.mark.parametrize("opened", ["base", "paceline", "agent"])
def test_a_cache_that_others_can_change_is_not_used(
    folder: Path, own: Callable[[int], Path], user: int, opened: str
) -> None:
    base = own(user)
    code = cache_of(base)
    {"base": base, "paceline": code.parents[1], "agent": code.parent}[opened].chmod(0o777)
    change(code)
    before = (code / "paceline_agent/server.py").read_bytes()
    assert boot(base, folder, user) == "need"
    assert not (code.parent / "ran").exists()
    assert (code / "paceline_agent/server.py").read_bytes() == before
    assert list((folder / "tmp").iterdir()) == []  # what was used instead is gone


@pytest.mark.parametrize("user", users())
def test_a_cache_of_another_user_is_not_used(
    folder: Path, own: Callable[[int], Path], user: int
) -> None:
    if os.getuid():
        return  # it takes root to make one
    base = own(NOBODY if user == 0 else 0)
    change(cache_of(base))
    for path in (base, *base.rglob("*")):
        path.chmod(0o777)
    assert boot(base, folder, user) == "need"
    assert not (cache_of(base).parent / "ran").exists()


@pytest.mark.parametrize("user", users())
def test_a_folder_that_all_share_holds_a_cache_of_ones_own(folder: Path, user: int) -> None:
    base = folder / "tmp" / "mine"  # sticky: what is made there stays whose it is
    assert boot(base, folder, user) == "need"
    assert boot(base, folder, user) == "have"
    assert cache_of(base).stat().st_uid == user
    assert cache_of(base).stat().st_mode & 0o777 == 0o700


def test_a_place_where_nothing_can_be_kept(folder: Path) -> None:
    (folder / "file").write_text("")
    assert boot(folder / "file", folder, os.getuid()) == "need"
    assert list((folder / "tmp").iterdir()) == []
