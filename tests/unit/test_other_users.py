"""Tests protection from other users of a machine: file modes, and paths created in advance."""

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
from paceline.agent.congestion import PIECE_BYTES
from paceline.agent.files import safe_paths, snapshot
from paceline.agent.files.data import DataCopies
from paceline.agent.frames import MAX_HELLO, Decoder, encode
from paceline.agent.multiplexing import FILES, Reassembler
from paceline.agent.supervision.activation import INDUCTOR_CACHE, job_environment
from paceline.agent.surveys import checks
from paceline.cli import main, supervise, trust
from paceline.cli.settings_file import read_settings_file
from paceline.hosts import read_hosts
from paceline.recipes.common import run as run_recipe
from paceline.recipes.data import IMAGE_SETS, download
from paceline.rundir import detached_file
from paceline.rundir.directory import RunDirectory, require_usable
from paceline.setup.journal import Change, Journal, write_file
from paceline.setup.keys import Identity, make_key_pair
from paceline.spec.errors import HostsError, SettingError
from paceline.train import files


@pytest.fixture(params=[0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    previous = os.umask(request.param)
    yield request.param
    os.umask(previous)


def modes(folder: Path) -> dict[str, int]:
    mode_by_path = {}
    for relative, folders, names in safe_paths.walk(str(folder)):
        for name in (*folders, *names):
            mode_by_path[f"{relative}/{name}"] = stat.S_IMODE(
                (folder / relative / name).lstat().st_mode
            )
    return mode_by_path


def test_run_directory_is_private(tmp_path: Path, umask: int) -> None:
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


@pytest.mark.parametrize(
    "make",
    [
        "setup.json",
        "config of ssh",
        "key pair",
        "trusted files",
        "seal",
        "data copy",
    ],
)
def test_folders_in_home_are_private(
    tmp_path: Path, umask: int, make: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a umask of 000, every new folder on the way is closed, not only the last one."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home / "a"))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(snapshot, "_cache_override", [])
    journal = Journal.read()
    if make == "setup.json":
        journal.add(Change("/x", None, None))
    elif make == "config of ssh":
        assert write_file(journal, home / "a" / ".ssh" / "config", b"x", 0o600)
    elif make == "key pair":
        make_key_pair(Identity(home / "a" / "keys" / "id", ""), "ed25519", journal)
    elif make == "trusted files":
        trust.remember(tmp_path / "paceline.toml", {})
    elif make == "seal":
        detached_file.ensure_key()
    else:
        copies = DataCopies("n1")
        copies.open_copy("0" * 24, "photos")
        copies.close()
    made = {path: stat.S_IMODE(path.lstat().st_mode) for path in home.rglob("*")}
    made[home] = stat.S_IMODE(home.lstat().st_mode)
    assert len(made) > 2
    for path, mode in made.items():
        assert not mode & (0o077 if path.is_dir() else 0o002), (path, oct(mode))


def test_cache_of_data_sets_is_private(
    tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    monkeypatch.setattr(download, "download", lambda _, target, *__: target)
    found = download.find_or_download(
        IMAGE_SETS["cifar10"], "", lambda _: False, download.DownloadOptions()
    )
    for folder in (found.parent, *found.parent.parents[:3]):
        assert stat.S_IMODE(folder.lstat().st_mode) == 0o700, folder


def test_recipe_prevents_world_writable_files(umask: int) -> None:
    """Also before it joins the job, as when it downloads data under another launcher."""
    assert run_recipe("image", lambda _: None, []) == 0
    assert os.umask(umask) == umask | 0o002


def test_parents_of_run_directory_are_not_writable_by_others(tmp_path: Path, umask: int) -> None:
    RunDirectory(tmp_path / "results" / "june" / "runs" / "one").close()
    for folder in ("results", "results/june", "results/june/runs"):
        assert stat.S_IMODE((tmp_path / folder).lstat().st_mode) == 0o775 & ~umask


def test_make_folder_refuses_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        safe_paths.make_folder(str(tmp_path / "file" / "folder"))
    with pytest.raises(FileExistsError):
        safe_paths.make_folder(str(tmp_path / "file"))


def test_main_prevents_world_writable_files(umask: int) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert os.umask(umask) == umask | 0o002


# --- compiled code


@pytest.fixture
def temp_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_inductor_cache_is_private_folder(temp_and_cache: Path) -> None:
    for _ in range(2):
        env = job_environment({}, {"python": "python3", "env": {}, "token": "t"})
        folder = Path(env[INDUCTOR_CACHE])
        assert folder.parent == temp_and_cache / "tmp"
        assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
    user_spec = {"python": "python3", "env": {INDUCTOR_CACHE: "/scratch"}, "token": "t"}
    assert job_environment({}, user_spec)[INDUCTOR_CACHE] == "/scratch"
    unset = {"python": "python3", "env": {}, "token": "t", "unset": [INDUCTOR_CACHE]}
    assert INDUCTOR_CACHE not in job_environment({INDUCTOR_CACHE: "/x"}, unset)


def test_inductor_cache_requires_sticky_parent(temp_and_cache: Path) -> None:
    for mode, is_used in ((0o1777, True), (0o777, False)):
        (temp_and_cache / "tmp").chmod(mode)
        env = job_environment({}, {"python": "python3", "env": {}, "token": "t"})
        assert (Path(env[INDUCTOR_CACHE]).parent == temp_and_cache / "tmp") == is_used


@pytest.mark.parametrize("kind", ["link", "file", "open to others", "of another user"])
def test_inductor_cache_avoids_planted_folder(
    temp_and_cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_folder = temp_and_cache / "tmp" / f"paceline-inductor-{os.getuid()}"
    if kind == "link":
        cache_folder.symlink_to(temp_and_cache)
    elif kind == "file":
        cache_folder.touch()
    else:
        cache_folder.mkdir(0o700)
        cache_folder.chmod(0o777 if kind == "open to others" else 0o700)
    if kind == "of another user":
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
        cache_folder.rename(cache_folder.with_name(f"paceline-inductor-{other}"))
    env = job_environment({}, {"python": "python3", "env": {}, "token": "t"})
    assert Path(env[INDUCTOR_CACHE]) == temp_and_cache / "cache" / "paceline" / "torchinductor"
    assert stat.S_IMODE(Path(env[INDUCTOR_CACHE]).lstat().st_mode) == 0o700


# --- paths that another user created first


@pytest.fixture
def open_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates a folder in which every user can create files, like /tmp."""
    tmp_path.chmod(0o1777)
    monkeypatch.chdir(tmp_path)
    other_uid, lstat = os.getuid() + 1, os.lstat

    def planted(path: str) -> SimpleNamespace:
        status = lstat(path)
        uid = other_uid if path.endswith((".toml", "planted", "n1", "runs")) else status.st_uid
        return SimpleNamespace(st_uid=uid, st_mode=status.st_mode)

    monkeypatch.setattr(os, "lstat", planted)
    return tmp_path


def test_rejects_run_directory_of_different_user(open_folder: Path) -> None:
    (open_folder / "planted").mkdir()
    for name in ("planted", "planted/one"):
        with pytest.raises(SettingError, match="belongs to another user"):
            require_usable(open_folder / name)
    require_usable(open_folder / "own")
    for name in ("planted", "runs"):
        (open_folder / name).mkdir(exist_ok=True)
        (open_folder / name).chmod(0o770)  # writable for a team
    require_usable(open_folder / "planted/one")
    with pytest.raises(SettingError, match="belongs to another user"):
        require_usable(open_folder / "runs/one")
    open_folder.chmod(0o775)  # writable for a team
    require_usable(open_folder / "planted")


def test_rejects_another_users_link_to_team_folder(open_folder: Path) -> None:
    """Such a link could redirect results to another folder of this user."""
    (open_folder / "own").mkdir()
    (open_folder / "own").chmod(0o770)
    (open_folder / "planted").symlink_to("own")
    for name in ("planted", "planted/one"):
        with pytest.raises(SettingError, match="belongs to another user"):
            require_usable(open_folder / name)


def test_rejects_settings_and_hosts_of_different_user(open_folder: Path) -> None:
    (open_folder / "paceline.toml").write_text('[run]\nhosts = "elsewhere"\n')
    with pytest.raises(SettingError, match=r"paceline\.toml belongs to another user"):
        read_settings_file(open_folder)
    (open_folder / "n1").write_text("elsewhere\n")
    with pytest.raises(HostsError, match="n1 is a file of another user"):
        read_hosts("n1", environ={}, cwd=open_folder)
    for source, name in (("n1,", "n1"), ("./n1", "elsewhere")):
        cluster = read_hosts(source, environ={}, cwd=open_folder)
        assert [host.name for host in cluster.hosts] == [name]


# --- a removed folder, a long greeting


def test_removed_folder_is_not_owned(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert directory.is_owned
    safe_paths.remove_tree(str(directory.path))
    assert not directory.is_owned
    other = RunDirectory(tmp_path / "run")  # by now the run of another user
    assert other.is_owned
    assert not directory.is_owned
    other.close()


def test_hello_size_is_limited() -> None:
    hello = encode({"event": "hello", "facts": [{}] * 1_000_000})
    decoder = Decoder(max_json=MAX_HELLO)
    assert not decoder.feed(hello)
    decoder.allow(len(hello), len(hello))
    assert len(decoder.feed(hello)) == 1
    joiner = Reassembler(MAX_HELLO)
    pieces = (hello[at : at + PIECE_BYTES[1]] for at in range(0, len(hello), PIECE_BYTES[1]))
    with pytest.raises(ValueError, match="more than 2 MiB"):
        [*map(list, (joiner.add({"part": FILES, "more": 1}, piece) for piece in pieces))]


def test_check_tokens_follow_no_links(
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


# --- files created by processes other than the command


@pytest.mark.parametrize("start", ["supervisor", "agent", "warm agent"])
def test_processes_on_hosts_use_umask_of_command(
    start: str, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks ``~/.config`` and the folder of jobs, with the login's umask 000."""
    folder = str(Path.cwd())
    if start == "supervisor":
        with pytest.raises(KeyError):  # without an argument for the folder
            supervise.main()
    elif start == "agent":
        monkeypatch.setattr(server.guard, "fork_agent", lambda package: sys.exit())
        monkeypatch.setattr(server.signal, "signal", lambda *_: None)
        with pytest.raises(SystemExit):
            server.main("", "", False)
    else:
        warm.Login(dict(os.environ), folder, umask).apply()
    assert os.umask(umask) == umask | 0o002
