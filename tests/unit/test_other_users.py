"""Other users of a machine: what they may write, and what they may have made before us."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.agent import server, warm
from paceline.agent.files import safe_paths
from paceline.agent.frames import MAX_HELLO, Decoder, encode
from paceline.agent.multiplexing import FILES, Reassembler
from paceline.agent.supervision.activation import INDUCTOR_CACHE, job_environment
from paceline.agent.surveys import checks
from paceline.cli import main, supervise
from paceline.cli.settings_file import read_settings_file
from paceline.hosts import read_hosts
from paceline.rundir.directory import RunDirectory, require_usable
from paceline.spec.errors import HostsError, SettingError
from paceline.train import files


@pytest.fixture(params=[0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    found = {}
    for above, folders, names in safe_paths.walk(str(folder)):
        for name in (*folders, *names):
            found[f"{above}/{name}"] = stat.S_IMODE((folder / above / name).lstat().st_mode)
    return found


def test_nobody_else_writes_a_run_directory(tmp_path: Path, umask: int) -> None:
    directory = RunDirectory(tmp_path / "runs" / "one")
    assert directory.key
    directory.event("begin")
    directory.write_json("plan.json", {})
    directory.append_bytes("logs/n1/0.log", b"x")
    files.write_json(directory.path / "model" / "config.json", {})
    assert stat.S_IMODE(directory.path.lstat().st_mode) == 0o700
    for name, mode in modes(tmp_path).items():
        assert not mode & 0o002 or name.endswith("/model"), (name, oct(mode))
        assert not mode & umask, (name, oct(mode))
    directory.close()


def test_the_program_makes_nothing_that_others_may_write(umask: int) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert os.umask(umask) == umask | 0o002


# --- compiled code


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_compiled_code_lies_in_a_folder_of_the_user(places: Path) -> None:
    for _ in range(2):
        env = job_environment({}, {"python": "python3", "env": {}, "token": "t"})
        folder = Path(env[INDUCTOR_CACHE])
        assert folder.parent == places / "tmp"
        assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
    own = {"python": "python3", "env": {INDUCTOR_CACHE: "/scratch"}, "token": "t"}
    assert job_environment({}, own)[INDUCTOR_CACHE] == "/scratch"
    unset = {"python": "python3", "env": {}, "token": "t", "unset": [INDUCTOR_CACHE]}
    assert INDUCTOR_CACHE not in job_environment({INDUCTOR_CACHE: "/x"}, unset)


def test_a_folder_that_others_could_rename_is_not_used(places: Path) -> None:
    for mode, is_used in ((0o1777, True), (0o777, False)):
        (places / "tmp").chmod(mode)
        env = job_environment({}, {"python": "python3", "env": {}, "token": "t"})
        assert (Path(env[INDUCTOR_CACHE]).parent == places / "tmp") == is_used


@pytest.mark.parametrize("made", ["link", "file", "open to others", "of another user"])
def test_a_folder_that_somebody_else_made_is_not_used(
    places: Path, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = places / "tmp" / f"paceline-inductor-{os.getuid()}"
    if made == "link":
        taken.symlink_to(places)
    elif made == "file":
        taken.touch()
    else:
        taken.mkdir(0o700)
        taken.chmod(0o777 if made == "open to others" else 0o700)
    if made == "of another user":
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
        taken.rename(taken.with_name(f"paceline-inductor-{other}"))
    env = job_environment({}, {"python": "python3", "env": {}, "token": "t"})
    assert Path(env[INDUCTOR_CACHE]) == places / "cache" / "paceline" / "torchinductor"
    assert stat.S_IMODE(Path(env[INDUCTOR_CACHE]).lstat().st_mode) == 0o700


# --- names that somebody else made first


@pytest.fixture
def open_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where everybody may make files, as /tmp is."""
    tmp_path.chmod(0o1777)
    monkeypatch.chdir(tmp_path)
    theirs, lstat = os.getuid() + 1, os.lstat

    def planted(path: str) -> SimpleNamespace:
        status = lstat(path)
        uid = theirs if path.endswith((".toml", "planted", "n1", "runs")) else status.st_uid
        return SimpleNamespace(st_uid=uid, st_mode=status.st_mode)

    monkeypatch.setattr(os, "lstat", planted)
    return tmp_path


def test_results_are_not_written_where_another_user_could_replace_them(open_folder: Path) -> None:
    (open_folder / "planted").mkdir()
    for name in ("planted", "planted/one"):
        with pytest.raises(SettingError, match="belongs to another user"):
            require_usable(open_folder / name)
    require_usable(open_folder / "own")
    for name in ("planted", "runs"):
        (open_folder / name).mkdir(exist_ok=True)
        (open_folder / name).chmod(0o770)  # of a team
    require_usable(open_folder / "planted/one")
    with pytest.raises(SettingError, match="belongs to another user"):
        require_usable(open_folder / "runs/one")
    open_folder.chmod(0o775)  # of a team
    require_usable(open_folder / "planted")


def test_a_link_of_another_user_to_a_folder_of_a_team_is_refused(open_folder: Path) -> None:
    """It would choose which folder of ours results go to."""
    (open_folder / "own").mkdir()
    (open_folder / "own").chmod(0o770)
    (open_folder / "planted").symlink_to("own")
    for name in ("planted", "planted/one"):
        with pytest.raises(SettingError, match="belongs to another user"):
            require_usable(open_folder / name)


def test_settings_and_hosts_that_another_user_left_there_are_refused(open_folder: Path) -> None:
    (open_folder / "paceline.toml").write_text('[run]\nhosts = "elsewhere"\n')
    with pytest.raises(SettingError, match=r"paceline\.toml belongs to another user"):
        read_settings_file(open_folder)
    (open_folder / "n1").write_text("elsewhere\n")
    with pytest.raises(HostsError, match="n1 is a file of another user"):
        read_hosts("n1", environ={}, cwd=open_folder)
    for source, name in (("n1,", "n1"), ("./n1", "elsewhere")):
        cluster = read_hosts(source, environ={}, cwd=open_folder)
        assert [host.name for host in cluster.hosts] == [name]


# --- a folder that goes, a greeting that is long


def test_a_folder_that_was_removed_is_noticed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert directory.is_owned
    safe_paths.remove_tree(str(directory.path))
    assert not directory.is_owned
    other = RunDirectory(tmp_path / "run")  # of somebody else's run by now
    assert other.is_owned
    assert not directory.is_owned
    other.close()


def test_a_greeting_is_short() -> None:
    hello = encode({"event": "hello", "facts": [{}] * 1_000_000})
    decoder = Decoder(max_json=MAX_HELLO)
    assert not decoder.feed(hello)
    decoder.allow(len(hello))
    assert len(decoder.feed(hello)) == 1
    with pytest.raises(ValueError, match="more than 2 MiB"):
        list(Reassembler(MAX_HELLO).add({"part": FILES, "more": 1}, hello))


def test_tokens_of_a_check_are_neither_written_nor_read_through_what_others_made(
    tmp_path: Path,
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (tmp_path / "token.new").symlink_to(victim)
    assert not checks.write_token(str(tmp_path), "token", "ours")["ok"]
    assert victim.read_text() == "as it was"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "token.new").unlink()
    assert checks.write_token(str(tmp_path), "token", "ours") == {"ok": True}
    seen = checks.read_tokens(str(tmp_path), ["pipe", "link", "token"])["seen"]
    assert seen == {"token": "ours"}


# --- what other processes than the command make


@pytest.mark.parametrize("start", ["supervisor", "agent", "warm agent"])
def test_processes_on_hosts_make_nothing_that_others_may_write(
    start: str, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as ``~/.config`` and the folder of jobs, with a login's umask of 000."""
    folder = str(Path.cwd())
    if start == "supervisor":
        with pytest.raises(KeyError):  # no folder
            supervise.main()
    elif start == "agent":
        monkeypatch.setattr(server.guard, "fork_agent", lambda package: sys.exit())
        monkeypatch.setattr(server.signal, "signal", lambda *_: None)
        with pytest.raises(SystemExit):
            server.main("", "", False)
    else:
        warm.Login(dict(os.environ), folder, umask).apply()
    assert os.umask(umask) == umask | 0o002
