"""Prints what a script sees of its process; the same under plain Python and as a rank."""

import atexit
import json
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path


class Thing:
    def __init__(self, value: int) -> None:
        self.value = value


def doubled(thing: Thing) -> int:
    return 2 * thing.value


def main() -> None:
    found = {
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "path0": sys.path[0],
        "spec": repr(__spec__),
        "main": sys.modules["__main__"].__file__,
        "modules": sorted(m for m in sys.modules if m.startswith(("paceline", "__mp"))),
        "threads": threading.active_count(),
        "handlers": {
            s.name: str(signal.getsignal(s))[:40].split(" at ")[0]
            for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)
        },
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "stdin": sys.stdin.read(),
        "encoding": [sys.stdout.encoding, sys.getfilesystemencoding()],
        "descriptors": sum(
            1 for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and int(fd.name) > 2
        ),
        "umask": (os.umask(0o22)),
        "leader": os.getsid(0) == os.getpid(),
        "optimize": sys.flags.optimize,
        "random": len({os.urandom(8) for _ in range(3)}),
    }
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found[method] = pool.map(doubled, [Thing(1), Thing(2)])
    print(json.dumps(found))
    print("ünïcode ✓")
    atexit.register(print, "at exit")
    sys.exit(3)


if __name__ == "__main__":
    main()
