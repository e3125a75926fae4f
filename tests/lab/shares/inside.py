"""Init program of a user-mode kernel: serves a share, mounts it twice, and tests our code on it.

Each mount has its own connection, so that the server sees two hosts. Prints the result of each
trial as one line of JSON. The host's folders are read-only here.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = Path("/usr/lib/uml/modules") / os.uname().release
A, B = Path("/mnt/a"), Path("/mnt/b")
TRIALS: list[Callable[[], Any]] = []


def trial(work: Callable[[], Any]) -> Callable[[], Any]:
    TRIALS.append(work)
    return work


def tell(name: str, said: Any) -> None:
    print("SAID " + json.dumps([name, said]), flush=True)


# --- kernel set-up


def load(*names: str) -> None:
    """Loads kernel modules with their dependencies."""
    libc = ctypes.CDLL(None, use_errno=True)
    needs = {}
    for line in (MODULES / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[Path(path).stem.replace("-", "_")] = [*reversed(others.split()), path]
    done: set[str] = set()
    for path in (path for name in names for path in needs.get(name, ()) if path not in done):
        done.add(path)
        file = os.open(MODULES / path, os.O_RDONLY)
        libc.syscall(313, file, b"", 0)  # finit_module
        os.close(file)


def sh(*argv: str, said: str = "") -> str:
    done = subprocess.run(argv, input=said, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stdout}{done.stderr}")
    return done.stdout


def listening(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"nothing listens on port {port}")


SMB = """[global]
server role = standalone server
interfaces = lo
bind interfaces only = yes
disable netbios = yes
smb ports = 445
load printers = no
log file = /mnt/smb/log
private dir = /mnt/smb
lock directory = /mnt/smb
state directory = /mnt/smb
cache directory = /mnt/smb
pid directory = /mnt/smb
ncalrpc dir = /mnt/smb
[data]
path = /mnt/share
read only = no
"""


def cifs() -> None:
    """Starts Samba's server and mounts its share with user and password, as in a common guide."""
    load("hmac", "cmac", "ecb", "ccm", "gcm", "ctr", "sha512_generic", "nls_utf8", "cifs")
    Path("/mnt/smb").mkdir()
    config = Path("/mnt/smb/smb.conf")
    config.write_text(SMB)
    sh("smbpasswd", "-c", str(config), "-a", "-s", "root", said="secret\nsecret\n")
    subprocess.Popen(["smbd", "-F", "--no-process-group", "-s", str(config)],
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    listening(445)
    options = "username=root,password=secret,uid=0,gid=0,rw,vers=3.0,nosharesock"
    for place in (A, B):
        sh("mount", "-t", "cifs", "//127.0.0.1/data", str(place), "-o", options)


def nfs() -> None:
    """Starts the kernel's NFS server and client, version 4.2."""
    load("nfsd", "nfsv4", "nfs")
    Path("/run/exports").write_text("/mnt/share 127.0.0.1(rw,no_root_squash,insecure,fsid=0)\n")
    for place in ("/run/nfs", "/run/rpc_pipefs"):
        Path(place).mkdir()
    sh("mount", "-t", "tmpfs", "none", "/var/lib/nfs")
    for name in ("etab", "rmtab"):
        Path("/var/lib/nfs", name).touch()
    Path("/var/lib/nfs/v4recovery").mkdir()
    sh("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
    sh("exportfs", "-o", "rw,no_root_squash,insecure,fsid=0", "127.0.0.1:/mnt/share")
    subprocess.Popen(["rpc.mountd", "--foreground", "--no-nfs-version", "3"],
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    sh("rpc.nfsd", "--no-nfs-version", "3", "2")
    listening(2049)
    for place in (A, B):
        mount_nfs(place)


def mount_nfs(place: Path) -> None:
    """Mounts the share with its own cache, as another host would."""
    options = "vers=4.2,nosharecache,addr=127.0.0.1,clientaddr=127.0.0.1"
    sh("mount", "-i", "-t", "nfs4", "127.0.0.1:/", str(place), "-o", options)


# --- what our code requires of a file system


@trial
def types() -> Any:
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return sorted(words[2] for words in mounts if words[1] in (str(A), str(B)))


@trial
def a_lock_holds_for_both() -> Any:
    from paceline.train.files import lock

    ours = os.open(A / "lock", os.O_RDWR | os.O_CREAT)
    theirs = os.open(B / "lock", os.O_RDWR | os.O_CREAT)
    first, second = lock(ours), lock(theirs)
    threading.Timer(0.5, lambda: os.close(ours)).start()
    begun = time.monotonic()
    waited = lock(theirs, wait=True)
    return [first, second, waited, time.monotonic() - begun > 0.3]


@trial
def a_file_is_replaced_while_it_is_read() -> Any:
    """This host or the other one replaces it; a reader keeps the file that it opened."""
    from paceline.train.files import write_bytes

    write_bytes(A / "pointer", b"old")
    said = []
    for place in (A, B):
        reader = (place / "pointer").open("rb")
        threading.Timer(0.5, reader.close).start()
        write_bytes(A / "pointer", b"new from " + place.name.encode())
        time.sleep(1.5)  # attributes may be cached for a second
        said.append([(one / "pointer").read_bytes().decode() for one in (A, B)])
    return said


@trial
def what_arrives_is_whole_on_the_other_host() -> Any:
    from paceline.agent.files import safe_paths

    safe_paths.write_file(str(A), "runs/1/result.json", b"{}")
    safe_paths.write_file(str(A), "runs/1/result.json", b"[1]")
    safe_paths.rename(str(A), "runs/1", "runs/2")
    safe_paths.remove(str(A), "runs/2")
    safe_paths.write_file(str(A), "runs/1/result.json", b"[2]")
    return (B / "runs/1/result.json").read_text()


@trial
def checkpoints() -> Any:
    """Published on one mount, found on the other; a second writer is refused or takes over."""
    from paceline.spec.errors import SettingError
    from paceline.spec.rundir import LATEST, read_pointer
    from paceline.spec.training.checkpoint_manifest import Manifest
    from paceline.train.checkpoints.store import Fenced, Store, WriterLock

    ours, theirs = Store(A / "run/checkpoints"), Store(B / "run/checkpoints")
    held, said = WriterLock(ours.root), []
    held.acquire()
    for other in (theirs, ours):
        try:
            WriterLock(other.root).acquire()
            said.append("taken")
        except SettingError as refused:
            said.append(refused.message.split(str(other.root))[0])
    for step in (10, 20, 30, 30):  # 30 again, as after a failed attempt
        made = ours.temporary(step)
        (made / "weights").write_bytes(b"w" * 100_000)
        ours.publish(made, Manifest(step, {}, {}))
        held.refresh()
    seen = sorted(int(p.name) for p in theirs.root.iterdir() if p.name.isdecimal())
    held.release()
    WriterLock(theirs.root).acquire()
    latest, size = (
        int(read_pointer(theirs.root / LATEST)),
        (theirs.root / "30/weights").stat().st_size,
    )
    made = ours.temporary(40)
    theirs.claim_token(0, "")
    with contextlib.suppress(Fenced):
        ours.publish(made, Manifest(40, {}, {}))
    taken_over = theirs.token == 2 and not (ours.root / "40").exists()
    return [said, seen, latest, size, taken_over]


@trial
def a_data_set_is_downloaded_once_by_two_hosts() -> Any:
    from paceline.recipes.data import NamedDataset, Remote
    from paceline.recipes.data.download import DownloadOptions, find_or_download

    content, asked = b"x" * 300_000, []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            time.sleep(0.3)
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    source = f"http://127.0.0.1:{server.server_address[1]}/"
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    named = NamedDataset("set", "idx", ("set",), "", "", remote=(Remote("x", digest, (source,)),))
    found = []

    def get(place: Path) -> None:
        whole = lambda folder: (folder / "x").is_file()  # noqa: E731
        quiet = DownloadOptions(log=lambda _: None)
        found.append(len((find_or_download(named, str(place), whole, quiet) / "x").read_bytes()))

    threads = [threading.Thread(target=get, args=(place / "sets",)) for place in (A, B)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [asked, found]


@trial
def the_cache_of_an_agent() -> Any:
    """Stores contents, trees and copies of data in a cache that lies on the share."""
    os.environ["XDG_CACHE_HOME"] = str(A / "cache")
    from paceline.agent.files import data, snapshot

    body = b"code" * 1000
    digest = hashlib.sha256(body).hexdigest()
    snapshot.store([(digest, body)])
    root = str(snapshot.job_folder("run1") / "code")
    damaged = snapshot.build_tree(root, [["a/b.py", digest, 0o644, len(body)]])
    copies, key = data.DataCopies("ab" * 16), "0123456789abcdef01234567"
    folder = copies.open_copy(key, "photos")
    mtime = 1_700_000_000_123_456
    copies.write_many(key, "photos", [["cats/1", 3, mtime]], b"one")
    copies.resume(key, "photos", "big")
    copies.write_block(key, "photos", "big", {"offset": 0, "last": False}, body)
    copies.close()  # interrupted
    again = data.DataCopies("cd" * 16)
    had = again.resume(key, "photos", "big")[0]
    last = {"offset": had, "last": True, "sha256": hashlib.sha256(body * 2).hexdigest()}
    again.write_block(key, "photos", "big", {**last, "mtime": mtime}, body)
    again.update(key, "photos", [], [["cats/1", 3, mtime + 1]])
    items, _ = again.next_page(str(folder), True)
    snapshot.remove_folder(Path(root))
    again.close()
    return [damaged, had, items, Path(root).exists()]


@trial
def a_training_goes_on_at_the_other_host() -> Any:
    """Runs the recipe with torch: ten steps and a checkpoint here, the rest on the other mount."""
    script = [sys.executable, "-B", "-m", "paceline.recipes.image", "--backend=gloo"]
    flags = ["--checkpoint-every=5", "--device=cpu", "--global-batch=32", "--keep=2"]
    said = []
    for place, steps in ((A, 10), (B, 14)):
        run = [f"--run-dir={place}/training", f"--steps={steps}"]
        done = subprocess.run([*script, *flags, *run], capture_output=True, text=True, check=False)
        said.append(done.stdout + done.stderr)
    steps = [*B.glob("training/checkpoints/[0-9]*")]
    resumed = "resumed after step 10 from /mnt/b/training/checkpoints/10" in said[1]
    done_there = (A / "training/model/model.safetensors").is_file()
    return [resumed, sorted(int(p.stem) for p in steps), done_there, "" if resumed else said]


@trial
def a_launched_run_has_its_folder_there() -> Any:
    """Launcher, agent and two ranks on one host; read meanwhile, and resumed from the other."""
    paceline = [sys.executable, "-B", "-m", "paceline"]
    flags = ["--check=none", "-p2", "--global-batch=32", "--checkpoint-every=2", "--device=cpu"]
    said = []
    for place, steps in ((A, 6), (B, 9)):
        run = [*paceline, "train", "image", *flags, f"--steps={steps}", f"--run-dir={place}/run2"]
        with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
            while child.poll() is None:
                for path in (place / "run2").glob("*.json*"):
                    with contextlib.suppress(FileNotFoundError):  # deleted after the listing
                        path.read_bytes()
                time.sleep(0.05)
            assert child.stdout is not None
            said.append([child.returncode, child.stdout.read().decode()])
    steps = sorted(int(p.stem) for p in A.glob("run2/checkpoints/[0-9]*"))
    good = [code for code, _ in said] == [0, 0] and "resumed after step 6" in said[1][1]
    return [good, steps, json.loads((B / "run2/result.json").read_text())["exit_code"],
            "" if good else said]  # fmt: skip


def prepare() -> None:
    for name in ("share", "a", "b"):
        Path("/mnt", name).mkdir()
    Path("/mnt/share").chmod(0o777)
    sh("hostname", "small")
    sh("ip", "link", "set", "lo", "up")


def main(kind: str, *wanted: str) -> None:
    prepare()
    try:
        {"cifs": cifs, "nfs": nfs}[kind]()
    except Exception:
        tell("mounted", traceback.format_exc())
        return
    tell("mounted", True)
    for work in TRIALS:
        if wanted and work.__name__ not in wanted:
            continue
        begun = time.monotonic()
        try:
            said = work()
        except BaseException:
            said = traceback.format_exc()
        tell(work.__name__, said)
        print(f"{work.__name__}: {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
