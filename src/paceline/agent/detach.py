"""Starts a process on a host that outlives its login: a caller or a run's supervisor.

Sent over standard input to ``python -c`` after ``bootstrap.py``. The process gets its own session.
This one stays until it is told to leave; if its input ends before, it ends what it has started.
Messages to the login follow a mark, one JSON object a line.
"""

# ruff: noqa
# fmt: off
import json, os, select, shutil, signal, subprocess, sys, time

MIN_PYTHON = (3, 10)  # of a supervisor: it is paceline itself
NAMES = ["python3"] + ["python3.%d" % minor for minor in range(20, 9, -1)]
END_S = 3.0
RETENTION_S = 7 * 24 * 3600.0  # results that nobody fetches, where their run says nothing else
DAY_S = 24 * 3600.0
FOLDER_VARIABLE = "PACELINE_SUPERVISED"  # as in cli/supervise.py
RUN = ("import os, sys; sys.path.insert(0, os.environ['%s'] + '/control'); "
       "from paceline.cli.supervise import main; sys.exit(main())" % FOLDER_VARIABLE)

def report(**words):
    os.write(1, b"\xf5PLleave " + json.dumps(words).encode() + b"\n")

def fail(reason, **details):
    report(refused=reason, **details)
    sys.exit(1)

def detach_caller():
    """Starts a caller, and ends it unless this process is told to leave."""
    told = json.loads(read_exactly(int(read_exactly(10))).decode())
    os.environ.update(told["env"])
    child = subprocess.Popen(told["argv"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, start_new_session=True)
    for name in told["env"]:
        del os.environ[name]
    words = child.stderr.fileno()
    report(started=child.pid)
    while True:
        ready = select.select([0, words], [], [])[0]
        if words in ready:
            said = os.read(words, 65536)
            if not said:  # it has ended
                status = child.wait()
                sys.exit(status if status >= 0 else 128 - status)
            os.write(2, said)
        if 0 in ready:
            if os.read(0, 64).startswith(b"stay"):
                report(left=True)
                sys.exit(0)
            end_caller(child)
            sys.exit(1)

def end_caller(child):
    """Terminates the process group of caller.py, then kills only caller.py itself: without it the
    agent ends and cleans up the job, which it could not do if it and its guard were killed."""
    try:
        os.killpg(child.pid, signal.SIGTERM)
        deadline = time.time() + END_S
        while child.poll() is None and time.time() < deadline:
            time.sleep(0.02)
    except OSError:
        pass
    child.kill()
    child.wait()

def find_python():
    """Finds a Python for paceline: this one, or another of this machine; "" if there is none."""
    if sys.version_info >= MIN_PYTHON:
        return sys.executable
    look = "import sys; sys.exit(sys.version_info < %r)" % (MIN_PYTHON,)
    for path in filter(None, map(shutil.which, NAMES)):
        if subprocess.call([path, "-I", "-c", look], stdin=subprocess.DEVNULL) == 0:
            return path
    return ""

def folder_of(run_id):
    """Makes the run's folder, which only this user can read and write."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    parent = os.path.realpath(os.path.join(base, "paceline", "detached"))
    before = os.umask(0o077)
    try:
        os.makedirs(parent, exist_ok=True)
        if not is_trusted_path(parent):
            fail("%s could be changed by others" % parent,
                   remedy="chmod go-w on it and on the folders above it")
        os.mkdir(os.path.join(parent, run_id), 0o700)
    except OSError as problem:
        fail("%s cannot be made: %s" % (parent, problem.strerror), remedy="Make room there, let"
               " it be written to, or set XDG_CACHE_HOME in your login there to another folder")
    finally:
        os.umask(before)
    remove_expired(parent)
    return os.path.join(parent, run_id)

def remove_expired(parent):
    """Removes results that were not fetched in time, according to two looks a day apart.

    The clock may have been wrong at the run's end, or may be now.
    """
    for name in os.listdir(parent):
        try:
            with open(os.path.join(parent, name, "about.json")) as file:
                about = json.load(file)
            if time.time() - about["ended"] <= about.get("keep_s", RETENTION_S):
                continue
            noted = os.path.join(parent, name, "expired")
            age_s = time.time() - os.stat(noted).st_mtime if os.path.exists(noted) else -1.0
            if age_s < 0:  # also if the clock was ahead at the last look
                open(noted, "w").close()
            elif age_s > DAY_S:
                shutil.rmtree(os.path.join(parent, name), True)
        except (OSError, ValueError, KeyError, TypeError):
            pass

def detach_supervisor():
    """Writes the run's files and starts the supervisor, which inherits the standard streams.

    The supervisor reports on a pipe when it no longer needs them. If it ends before, the run's
    folder is removed. The folder's name is not in its arguments, which all users can read: the
    run's socket has this name, and another user could take it first.
    """
    told = json.loads(read_exactly(int(read_exactly(10))).decode())
    python = told["python"] or find_python()
    if not python:
        fail("Python %d.%d or newer is needed for a supervisor" % MIN_PYTHON,
               found="%s is %d.%d" % ((sys.executable,) + sys.version_info[:2]),
               remedy="Install one, or name another host: --supervisor HOST")
    folder = folder_of(told["run_id"])
    try:
        for name, path in told["trees"].items():
            shutil.move(path, os.path.join(folder, name))
        code = ["-I", "-c", RUN] if "control" in told["trees"] else [
            # without the current folder, which may be a run directory with files of hosts
            "-c", "import sys; sys.path[:] = filter(None, sys.path)\n"
            "from paceline.cli.supervise import main; raise SystemExit(main())"]
        alone, needed = os.pipe()
        os.set_inheritable(needed, True)
        child = subprocess.Popen([python] + code + [str(needed)], close_fds=True,
                                 pass_fds=[needed], start_new_session=True,
                                 env=dict(os.environ, **{FOLDER_VARIABLE: folder}))
    except BaseException:
        shutil.rmtree(folder, True)
        raise
    os.close(needed)
    if os.read(alone, 1):
        sys.exit(0)
    status = child.wait()
    shutil.rmtree(folder, True)
    sys.exit(status if status >= 0 else 128 - status)
