"""Ends, or refuses to end, in the way of its argument: ``end.py WAY [RANK]`` (other ranks wait)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

way, chosen = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None
rank = int(os.environ["RANK"])


def wait() -> None:
    print("waiting", flush=True)
    time.sleep(600)


def daemon() -> None:
    """Starts a grandchild with its own session that has left its parent and closed its output."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(3):
                os.close(fd)
            os.environ.pop("PACELINE_JOB_TOKEN", None)
            os.execvpe("sleep", ["sleep", "611"], {"PATH": os.environ["PATH"]})
        os._exit(0)
    os.wait()


def write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def on_term(*_: object) -> None:
    time.sleep(0.5)
    write_all(b"saved\n")  # print would fail inside an interrupted print
    sys.exit(0)


if chosen is not None and rank != chosen:
    wait()
elif way == "raise":
    raise ValueError(f"boom on {rank}")
elif way == "exit":
    sys.exit(7)
elif way == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif way == "segv":
    os.kill(os.getpid(), signal.SIGSEGV)
elif way == "save":
    signal.signal(signal.SIGTERM, on_term)
    wait()
elif way == "ignore":
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    wait()
elif way == "stopped":
    print("waiting", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    wait()
elif way == "children":
    subprocess.Popen(["sleep", "611"], start_new_session=True)
    subprocess.Popen(["sleep", "611"], start_new_session=True, env={"PATH": os.environ["PATH"]})
    daemon()
    wait()
elif way == "leave":
    subprocess.Popen(["sleep", "611"], start_new_session=True)
    daemon()
elif way == "flood":
    line = b"x" * 99 + b"\n"
    blocks = int(os.environ.get("T_BLOCKS", "500"))
    for _ in range(blocks):
        write_all(line * 1000)
    os.write(1, b"end\n")
elif way == "once":
    attempt = int(os.environ["PACELINE_ATTEMPT"])
    print(f"attempt {attempt} {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
    sys.exit(3 if attempt == 0 else 0)
elif way == "recover":
    attempt = int(os.environ["PACELINE_ATTEMPT"])
    print(f"attempt {attempt} of {rank} to err", file=sys.stderr, flush=True)
    if attempt == 0:
        raise ValueError(f"boom on {rank}")
elif way == "differently":
    attempt = int(os.environ["PACELINE_ATTEMPT"])
    if attempt == 0:
        raise ValueError(f"boom on {rank}")
    sys.exit("disk quota is used up")
elif way == "write":
    Path(f"result-{rank}.txt").write_text(f"of {rank}\n")
    Path("out").mkdir(exist_ok=True)
    (Path("out") / "deep.bin").write_bytes(bytes(range(256)))
    (Path(os.environ["PACELINE_RUN_DIR"]) / f"kept-{rank}.txt").write_text("kept\n")
elif way == "large":
    Path("large.bin").write_bytes(bytes(8 << 20))
elif way == "both":
    print("to out", flush=True)
    print("to err", file=sys.stderr, flush=True)
else:
    wait()
