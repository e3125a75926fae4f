"""Sets up an environment: a lab whose hosts differ as its values say, and a project on it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from environments import Environment

from background import BackgroundCommand
from paceline.lab import Lab, LabOptions
from paceline.lab.available import find_tool

JOBS = Path(__file__).with_name("jobs")
SOURCE = Path(
    os.environ.get("PACELINE_MATRIX_SOURCE") or Path(__file__).resolve().parents[2] / "src"
)
HOSTS = ("n1", "n2")
DEADLINE_S = 150.0  # for a command that hangs; on an idle machine the slowest command takes 10 s
QUOTA = "96m"  # Paceline requires 50 MiB of free space
SMALL_SHM = "64k"
NOBODY = {4: "10.66.0.99", 6: "fd77::99"}  # addresses that no host has
DATA = {"a.txt": "first\n", "below/b.bin": "second\n" * 1000}


@dataclass(frozen=True)
class Login:
    """The account that logs in on one host."""

    user: str
    uid: int
    home: str
    shell: str
    cache: str | None


@dataclass
class Site:
    """A lab that is set up as ``environment`` says; ``project`` is the launcher's folder."""

    environment: Environment
    lab: Lab
    project: Path
    folder: Path
    transcript: list[str] = field(default_factory=list)

    def login(self, host: str) -> Login:
        return _login(self.environment, host)

    def start(self, verb: str, *words: str, hosts: bool = True) -> Command:
        """Starts ``paceline VERB -H … WORDS`` in the project, on the launcher's host."""
        where = ["-H", ",".join(HOSTS), "--ssh-config", str(self.folder / "ssh_config")]
        argv = [sys.executable, "-m", "paceline", verb, *(where if hosts else []), *words]
        return Command(self, argv)

    def run(self, verb: str, *words: str, hosts: bool = True) -> Command:
        """Runs ``paceline VERB -H … WORDS`` to its end."""
        with self.start(verb, *words, hosts=hosts) as command:
            command.wait()
        return command

    def ssh(self, host: str, script: str) -> Command:
        """Runs a sh script on a host to its end, through ordinary SSH."""
        config = str(self.folder / "ssh_config")
        with Command(
            self, ["ssh", "-F", config, host, shlex.join(["sh", "-c", script])]
        ) as command:
            command.wait()
        return command

    def popen(self, argv: Sequence[str], **files: Any) -> subprocess.Popen[bytes]:
        """Starts a command on the launcher's host, as the launcher's user."""
        if self.environment.launcher == "outside":
            return subprocess.Popen(
                argv, cwd=self.project, env={**os.environ, "PYTHONPATH": str(SOURCE)},
                umask=int(self.environment.umask, 8), **files,
            )  # fmt: skip
        login = self.login("n1")
        env = {
            "HOME": login.home, "USER": login.user, "LOGNAME": login.user, "SHELL": login.shell,
            "PYTHONPATH": str(SOURCE), "PACELINE_OPT_REPORT": "no",
            **({"XDG_CACHE_HOME": login.cache} if login.cache else {}),
        }  # fmt: skip
        words = ["setpriv", f"--reuid={login.uid}", f"--regid={login.uid}", "--clear-groups",
                 *_cpu_prefix(self.environment), "sh", "-c",
                 f'umask {self.environment.umask}; exec "$@"', "sh", *argv]  # fmt: skip
        return self.lab.popen("n1", words, env=env, cwd=self.project, **files)


class Command(BackgroundCommand):
    """A command that was started, recorded in the site's transcript."""

    def __init__(self, site: Site, argv: list[str]) -> None:
        self._site = site
        self._argv = argv
        self._index = len(site.transcript)
        site.transcript.append("")
        self._started_at = time.monotonic()
        super().__init__(site.folder / f"command-{self._index}", partial(site.popen, argv))
        self._record()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._record()

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def wait(self) -> None:
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {DEADLINE_S:.0f} s") from None
        finally:
            self._record()

    def _record(self) -> None:
        status = "running" if self.status is None else f"status {self.status}"
        seconds = time.monotonic() - self._started_at
        self._site.transcript[self._index] = (
            f"$ {shlex.join(self._argv)}\n[{status}, {seconds:.1f} s]\n"
            f"--- stdout\n{self.out[-6000:]}--- stderr\n{self.err[-6000:]}"
        )


@contextlib.contextmanager
def site(environment: Environment, folder: Path) -> Iterator[Site]:
    """Sets up the environment in ``folder``, which all hosts see, and removes it afterwards.

    Needs root: only root may make users and mounts of any kind.
    """
    folder.chmod(0o755)
    project = folder / "work/project"
    shutil.copytree(JOBS, project, ignore=shutil.ignore_patterns("__pycache__"))
    _write_data(folder / "data")
    (folder / "tmp").mkdir()
    with _small_homes(environment, folder), Lab(_options(environment, folder)) as lab:
        made = Site(environment, lab, project, folder)
        for host in HOSTS:
            _make_host(made, host)
        _make_project(made)
        yield made


def _options(environment: Environment, folder: Path) -> LabOptions:
    other = {"n2": str(_other_python(folder))} if environment.python == "different" else {}
    return LabOptions(
        hosts=len(HOSTS),
        shared_home=environment.home != "private",
        ipv6_only=environment.network != "ipv4",
        debian_hosts=environment.names == "loopback",
        dead_interface=environment.names == "wrong",
        dead_name=environment.names == "wrong",
        private=(f"/dev/shm:{SMALL_SHM}",) if environment.shm == "small" else (),
        python=other,
        share=(str(folder), str(SOURCE)),
    )


def _other_python(folder: Path) -> Path:
    """Makes a virtual environment at another path, with the packages of the running one."""
    made = folder / "other python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    (packages,) = made.glob("lib/python*/site-packages")
    mine = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "same.pth").write_text(f"import site; site.addsitedir({mine!r})\n")
    return made


@contextlib.contextmanager
def _small_homes(environment: Environment, folder: Path) -> Iterator[None]:
    """Mounts small file systems for homes with a quota before the lab starts; hosts may share."""
    mounted = []
    names = dict.fromkeys(_home_of(environment, host) for host in HOSTS)
    try:
        for path in [folder / "homes" / name for name in names]:
            path.mkdir(parents=True)
            if environment.quota == "small":
                command = ["mount", "-t", "tmpfs", "-o", f"size={QUOTA},mode=700", "home", path]
                subprocess.run(command, check=True)
                mounted.append(path)
        yield
    finally:
        for path in mounted:
            subprocess.run(["umount", path], check=True)


def _home_of(environment: Environment, host: str) -> str:
    return host if environment.home == "private" else "all"


def _login(environment: Environment, host: str) -> Login:
    second = host == "n2"
    user, uid = {
        "root": ("root", 0),
        "ordinary": ("ada", 1501),
        "different": ("bob", 1502) if second else ("ada", 1501),
    }[environment.user]
    above = "/run/users" if environment.home == "moved" and second else "/run/home"
    shell = shutil.which(environment.shell)
    assert shell, f"{environment.shell} is not installed: tools/system-parts.sh all"
    cache = f"/tmp/cache of {user}" if environment.cache == "tmp" else None
    return Login(user, uid, f"{above}/{user}", shell, cache)


# --- set-up of a host


def _make_host(site: Site, host: str) -> None:
    environment, lab, login = site.environment, site.lab, site.login(host)
    _add_user(lab, host, login)
    _write_names(environment, lab, host)
    script = "\n".join(
        ["set -e", *_network(environment, host), *_opened(site), *_tmp(site),
         *_home(site, host, login), *_project(site, host)]
    )  # fmt: skip
    lab.exec(host, ["sh", "-c", script], check=True, timeout=DEADLINE_S)
    _write_startup(environment, lab, host, login)
    _restart_sshd(site, host, login)


def _add_user(lab: Lab, host: str, login: Login) -> None:
    entry = f"{login.user}:x:{login.uid}:{login.uid}::{login.home}:{login.shell}"
    _put_line(lab.layout.etc(host) / "passwd", login.user, entry)
    _put_line(lab.layout.etc(host) / "group", login.user, f"{login.user}:x:{login.uid}:")
    _put_line(lab.layout.etc(host) / "shadow", login.user, f"{login.user}:*:19000:0:99999:7:::")


def _put_line(file: Path, name: str, line: str) -> None:
    """Puts a line first, replacing the one for that name; writes in place: the file is mounted."""
    others = [old for old in file.read_text().splitlines() if old.split(":")[0] != name]
    file.write_text("\n".join([line, *others]) + "\n")


def _write_names(environment: Environment, lab: Lab, host: str) -> None:
    file = lab.layout.etc(host) / "hosts"
    lines = file.read_text().splitlines()
    if environment.names == "unknown":
        lines = [line for line in lines if "localhost" in line]
    if environment.names == "wrong":
        nobody = NOBODY[4 if environment.network == "ipv4" else 6]
        lines = [line for line in lines if line.split()[-1] in (host, "localhost")]
        lines += [f"{nobody} {other}" for other in HOSTS if other != host]
    if environment.network == "mixed" and host == "n1" and environment.names == "known":
        lines.insert(0, "10.78.0.11 n1")
    file.write_text("\n".join(lines) + "\n")


def _network(environment: Environment, host: str) -> Iterator[str]:
    if environment.network == "mixed" and host == "n1":
        yield "ip address add 10.78.0.11/24 dev eth0"


def _opened(site: Site) -> Iterator[str]:
    """Yields commands that let every user reach what jobs need and this machine keeps closed.

    If the interpreter or the checkout is in a user's home, ordinary users of a host find only these
    files there.
    """
    if site.environment.user == "root":
        return
    closed = {path: _closed_parent(path) for path in _NEEDED if _closed_parent(path)}
    for number, path in enumerate(closed):
        yield f"mkdir -p /run/open/{number}"
        yield f"mount --rbind {shlex.quote(path)} /run/open/{number}"
    for parent in sorted(set(closed.values())):
        yield f"mount -t tmpfs -o mode=755 none {shlex.quote(parent)}"
    for number, path in enumerate(closed):
        yield f"mkdir -p {shlex.quote(path)}"
        yield f"mount --rbind /run/open/{number} {shlex.quote(path)}"


_NEEDED = sorted({sys.prefix, str(Path(sys.base_prefix).resolve()), str(SOURCE)})


def _closed_parent(path: str) -> str:
    """Returns the topmost folder above ``path`` that others cannot enter; "" if all can.

    A host's own ``/tmp`` has no closed folders.
    """
    closed = [str(parent) for parent in Path(path).parents if not parent.stat().st_mode & 0o001]
    return "" if not closed or path.startswith("/tmp/") else closed[-1]


def _tmp(site: Site) -> Iterator[str]:
    """Yields commands that set up ``/tmp``; what the lab mounts below it is kept."""
    if site.environment.tmp == "noexec":
        yield "mount -o remount,bind,nosuid,noexec /tmp"
    if site.environment.tmp == "shared":
        kept = [path for path in (*site.lab.plan.shared, str(site.lab.layout.root))
                if path.startswith("/tmp/")]  # fmt: skip
        for number, path in enumerate(kept):
            yield f"mkdir -p /run/kept/{number}"
            yield f"mount --rbind {shlex.quote(path)} /run/kept/{number}"
        yield f"mount --bind {shlex.quote(str(site.folder / 'tmp'))} /tmp"
        yield "chmod 1777 /tmp"
        for number, path in enumerate(kept):
            yield f"mkdir -p {shlex.quote(path)}"
            yield f"mount --rbind /run/kept/{number} {shlex.quote(path)}"


def _home(site: Site, host: str, login: Login) -> Iterator[str]:
    """Yields commands that put the login's home and its keys where its account says."""
    source = shlex.quote(site.lab.home_inside())
    home = shlex.quote(login.home)
    if site.environment.quota == "small":
        small = site.folder / "homes" / _home_of(site.environment, host)
        yield f"cp -a {source}/. {shlex.quote(str(small))}/"
        source = shlex.quote(str(small))
    yield f"mkdir -p {home}"
    yield f"mount --bind {source} {home}"
    yield f"chown -R {login.uid}:{login.uid} {home}"
    yield f"chmod 755 $(dirname {home})"
    yield f"chmod 700 {home}"


def _project(site: Site, host: str) -> Iterator[str]:
    is_launcher = site.environment.launcher == "first-host" and host == "n1"
    if site.environment.project == "shipped" and not is_launcher:
        yield f"mount -t tmpfs -o mode=755 none {shlex.quote(str(site.project.parent))}"


_RC_FILES = {
    "bash": ".bashrc",
    "zsh": ".zshenv",
    "fish": ".config/fish/config.fish",
    "tcsh": ".tcshrc",
    "dash": ".ssh/rc",  # sshd reads it at every login
}
_READ = "read answer"
_READS = {"bash": _READ, "zsh": _READ, "fish": _READ, "tcsh": 'set answer = "$<"'}
_EXECS = {
    "bash": 'exec zsh -f -c "$BASH_EXECUTION_STRING"',
    "zsh": 'exec bash --norc -c "$ZSH_EXECUTION_STRING"',
    "fish": "exec dash -c (string split0 < /proc/$fish_pid/cmdline)[3]",
    "tcsh": "exec dash -c $command:q",
}
_EXITS = {"bash": "exec fish", "zsh": "exit 0", "fish": "exec bash", "tcsh": "exec bash"}
GREETING_LINES = 200


def _write_startup(environment: Environment, lab: Lab, host: str, login: Login) -> None:
    """Writes the login shell's start-up file: the umask, then what the environment says."""
    shell = environment.shell
    umask = [] if shell == "dash" else [f"umask {environment.umask}"]
    does = {
        "silent": "",
        "prints": f"seq -f 'Welcome to {host}, line %.0f' {GREETING_LINES}\n"
        "sh -c 'echo a warning >&2'\nprintf 'no newline'",
        "reads": _READS.get(shell),
        "execs": _EXECS.get(shell),
        "exits": _EXITS.get(shell),
    }[environment.startup]
    file = f"{login.home}/{_RC_FILES[shell]}"
    script = 'umask 022; mkdir -p "$(dirname "$1")"; cat >"$1"; chown -R "$2" "$3"'
    argv = ["sh", "-c", script, "sh", file, f"{login.uid}:{login.uid}", login.home]
    text = "\n".join([*umask, does or "", ""])
    lab.exec(host, argv, input=text, check=True, timeout=DEADLINE_S)


def _cpu_prefix(environment: Environment) -> list[str]:
    return ["taskset", "-c", "0"] if environment.cpus == "one" else []


def _restart_sshd(site: Site, host: str, login: Login) -> None:
    """Restarts sshd with the umask, the CPUs and the variables of the environment."""
    config = site.lab.layout.sshd_config(host)
    if login.cache:
        lines = config.read_text().splitlines()
        extra = f' "XDG_CACHE_HOME={login.cache}"'
        lines = [line + extra * line.startswith("SetEnv ") for line in lines]
        config.write_text("\n".join(lines) + "\n")
    argv = [*_cpu_prefix(site.environment), find_tool("sshd") or "sshd", "-f", str(config),
            "-E", str(site.lab.sshd_log(host))]  # fmt: skip
    script = f"""
        listener=$(pgrep -o -x sshd)
        kill "$listener"
        while kill -0 "$listener" 2>/dev/null; do sleep 0.02; done
        umask {site.environment.umask}
        exec "$@"
    """
    site.lab.exec(host, ["sh", "-c", script, "sh", *argv], check=True, timeout=DEADLINE_S)


# --- set-up of the launcher


def _write_data(folder: Path) -> None:
    for name, text in DATA.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o644)
        file.parent.chmod(0o755)


def _make_project(site: Site) -> None:
    """Gives the project to the login's user, and the launcher a route to the hosts."""
    environment, lab = site.environment, site.lab
    login = site.login("n1")
    _write_ssh_config(site)
    is_outside = environment.launcher == "outside"
    folder_mode = 0o777 if is_outside or environment.user == "different" else 0o755
    for path in (site.project, *site.project.rglob("*")):
        os.chown(path, login.uid, login.uid)
        path.chmod(folder_mode if path.is_dir() else 0o644)
    if environment.python == "different":
        settings = site.project / "paceline.toml"
        python = json.dumps(lab.plan.host("n2").python)
        settings.write_text(f"[hosts.n2]\npython = {python}\n")
        os.chown(settings, *(2 * [0 if is_outside else login.uid]))
        settings.chmod(0o644)
        trusted = site.run("trust", hosts=False)
        assert trusted.status == 0, site.transcript


def _write_ssh_config(site: Site) -> None:
    """Writes an ssh config with the users; on a host, its user gets a copy and a key of its own."""
    lab, folder, login = site.lab, site.folder, site.login("n1")
    key, known = lab.layout.identity, lab.layout.known_hosts
    if site.environment.launcher == "first-host":
        for source, name in ((key, "key"), (known, "known_hosts")):
            shutil.copy(source, folder / name)
            os.chown(folder / name, login.uid, login.uid)
        (folder / "key").chmod(0o600)
        key, known = folder / "key", folder / "known_hosts"
        (folder / "known_hosts").chmod(0o644)
    lines = [f"Host {host}\n  User {site.login(host).user}" for host in HOSTS]
    lines += [
        "Host *",
        f'  IdentityFile "{key}"',
        f'  UserKnownHostsFile "{known}"',
        *_without_files(lab),
    ]
    (folder / "ssh_config").write_text("\n".join(lines) + "\n")
    (folder / "ssh_config").chmod(0o644)


def _without_files(lab: Lab) -> list[str]:
    """Returns the lines of the lab's ssh config without files that only its owner can read."""
    barred = ("IdentityFile", "UserKnownHostsFile")
    lines = lab.ssh_config.read_text().splitlines()
    return [line for line in lines if not line.strip().startswith(barred)]
