"""Remedies of ``paceline explain`` cure the faults that they are given for.

Each case produces a fault with real programs, has its output explained, types what the remedy says,
and sees the same work succeed. Everything runs in a sandbox with a network, mounts and processes of
its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.explain.conclusion import conclude
from paceline.explain.evidence_reader import from_log
from paceline.explain.rules import load, load_all

pytestmark = pytest.mark.slow

SANDBOX = """
exec 2>&1
ip link set lo up
mount -t tmpfs x /dev/shm && mount -t tmpfs x /mnt && cd /mnt && export HOME=/mnt
mkdir folder quick && echo "$SITE" > quick/sitecustomize.py && export PYTHONPATH=/mnt/quick
cat > script.py
exec < /dev/null
sudo() { "$@"; }
"""
# torch's import and the exit after it look for garbage, and find none, in a third of their time
SITE = "import atexit, gc; gc.disable(); atexit.register(gc.freeze)"
LIMIT_S = 120.0
ALONE = "export RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500\n"
INIT = "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"


@dataclass(frozen=True)
class Cure:
    """A fault, and the remedy that ends it.

    Attributes:
        script: ``script.py``, which the commands run; it may look whether CURED is set.
        setup: Shell lines that bring the fault about.
        fault: The command that fails.
        typed: A part of the remedy.
        cured: The remedy and the command that now succeeds; by default ``fault`` with CURED set.
    """

    script: str = ""
    setup: str = ""
    fault: str = "python script.py"
    typed: str = ""
    cured: str = ""


CURES = {
    "disk-full": Cure(
        "open('folder/new', 'wb').write(bytes(1 << 20))",
        "mount -t tmpfs -o size=1500k x folder; head -c 200k /dev/zero > folder/small\n"
        "head -c 1m /dev/zero > folder/old",
        typed="du -xsh FOLDER/* | sort -h",
        cured="rm $(du -xsh folder/* | sort -h | tail -n 1 | cut -f 2); python script.py",
    ),
    "too-many-files": Cure(
        "import os, torch\n"
        "if 'CURED' in os.environ: torch.multiprocessing.set_sharing_strategy('file_system')\n"
        "shared = [torch.ones(1).share_memory_() for _ in range(200)]",
        "ulimit -n 128",
        typed='torch.multiprocessing.set_sharing_strategy("file_system")',
    ),
    "port-taken": Cure(
        INIT,
        ALONE + "python -m http.server --bind 0.0.0.0 29500 > /dev/null 2>&1 &\nsleep 1",
        typed="paceline run",
        cured="unset MASTER_ADDR MASTER_PORT RANK WORLD_SIZE; paceline run -p 1 script.py",
    ),
    "missing-module": Cure(
        "", "mkdir pkg; touch pkg/model.py; echo 'import pkg.model' > pkg/train.py",
        fault="paceline run -p 1 --no-torch pkg/train.py",
        typed="paceline run -m pkg.train",
        cured="paceline run -p 1 --no-torch -m pkg.train",
    ),
    "missing-file": Cure(
        "import os\nopen(os.path.join(os.environ.get('PACELINE_DATA_DIR', '/data'), 'train.csv'))",
        "touch folder/train.csv",
        fault="paceline run -p 1 --no-torch script.py",
        typed="paceline run --data FOLDER SCRIPT",
        cured="paceline run -p 1 --no-torch --data folder script.py",
    ),
    "unused-parameters": Cure(
        INIT + "from torch.nn.parallel import DistributedDataParallel\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.used, self.unused = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)\n"
        "    def forward(self, x): return self.used(x)\n"
        "net = DistributedDataParallel(Net(), find_unused_parameters='CURED' in os.environ)\n"
        "for _ in range(2): net(torch.ones(1, 1)).sum().backward()",
        ALONE,
        typed="DistributedDataParallel(model, find_unused_parameters=True)",
    ),
    "batch-of-one": Cure(
        "import os, torch\nnet, data = torch.nn.BatchNorm1d(2), torch.ones(9, 2)\n"
        "for x in torch.utils.data.DataLoader(data, 4, drop_last='CURED' in os.environ): net(x)",
        typed="DataLoader(data, drop_last=True)",
    ),
    "shared-memory-small": Cure(
        "import torch\n"
        "list(torch.utils.data.DataLoader(torch.ones(8, 1 << 20), batch_size=4, num_workers=1))",
        "mount -o remount,size=1m /dev/shm",
        typed="sudo mount -o remount,size=8g /dev/shm",
        cured="sudo mount -o remount,size=8g /dev/shm; python script.py",
    ),
    "read-as-data": Cure(
        "", "echo 'echo hello from the start-up file' > .bashrc\n"
        "printf '#!/bin/bash\\n. /mnt/.bashrc\\nexec /usr/lib/openssh/sftp-server\\n' > server\n"
        "chmod +x server",
        fault="echo pwd | sftp -b - -D ./server",
        typed="case $- in *i*) ;; *) return ;; esac",
        cured="sed -i '1i case $- in *i*) ;; *) return ;; esac' .bashrc\n"
        "echo pwd | sftp -b - -D ./server",
    ),
    "noexec": Cure(
        "import ctypes\nctypes.CDLL('/mnt/library.so')",
        "cp $(python -c 'import select; print(select.__file__)') library.so\n"
        "mount -o remount,noexec /mnt",
        typed="sudo mount -o remount,exec /tmp",
        cured="sudo mount -o remount,exec /mnt; python script.py",
    ),
    "read-only-disk": Cure(
        "open('/mnt/folder/new', 'w')", "mount -t tmpfs -o ro x folder",
        typed="sudo mount -o remount,rw MOUNT",
        cured="sudo mount -o remount,rw /mnt/folder; python script.py",
    ),
    "blank-in-address": Cure(
        INIT.replace("'gloo'", "'gloo', timeout=__import__('datetime').timedelta(seconds=5)"),
        ALONE + "export RANK=1 WORLD_SIZE=2 MASTER_ADDR='127.0.0.1 '",
        typed="export MASTER_ADDR=$(echo $MASTER_ADDR | xargs)",
        cured="export MASTER_ADDR=$(echo $MASTER_ADDR | xargs); RANK=0 python script.py &\n"
        "python script.py",
    ),
    "interface-missing": Cure(
        INIT + "dist.all_reduce(torch.ones(1))", ALONE + "export GLOO_SOCKET_IFNAME=eth7",
        typed="Leave the variable out: `paceline run` sets it for each node",
        cured="unset GLOO_SOCKET_IFNAME RANK WORLD_SIZE MASTER_ADDR MASTER_PORT\n"
        "paceline run -p 1 script.py",
    ),
    "not-launched": Cure(
        INIT, typed="mpirun -n N paceline env python SCRIPT",
        cured="mpirun --allow-run-as-root --oversubscribe -n 2 paceline env python script.py\n"
        "[ $? = 0 ] && paceline run -p 1 script.py",
    ),
    "unplanned-world": Cure(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', 'tcp://127.0.0.1:29777', rank=0, world_size=1)\n"
        "dist.destroy_process_group()",
        fault="paceline run -p 2 script.py",
        typed="--any-world",
        cured="sed -i s/29777/0/ script.py; paceline run -p 2 --any-world script.py",
    ),
    "local-rank-required": Cure(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int, required=True)\nparser.parse_args()",
        fault="paceline run -p 1 --no-torch script.py",
        typed="paceline run --pass-local-rank SCRIPT",
        cured="paceline run -p 1 --no-torch --pass-local-rank script.py",
    ),
    "wrong-arguments": Cure(
        "import argparse\nargparse.ArgumentParser().parse_args()",
        fault="paceline run --no-torch script.py -p 1",
        typed="options of Paceline go before the script's name",
        cured="paceline run --no-torch -p 1 script.py",
    ),
    "cut-checkpoint": Cure(
        "import glob, torch\ntorch.load(sorted(glob.glob('folder/*.pt'))[-1])",
        "python -c 'import torch; torch.save(torch.ones(999), \"folder/1.pt\")'\n"
        "head -c 2000 folder/1.pt > folder/2.pt",
        typed="Load the checkpoint before it, and delete the broken one",
        cured="rm folder/2.pt; python script.py",
    ),
    "wrong-checkpoint": Cure(
        "import os, torch\nnet = torch.nn.Linear(1, 1)\n"
        "state = {f'module.{name}': value for name, value in net.state_dict().items()}\n"
        "if 'CURED' in os.environ:\n"
        "    state = {name.removeprefix('module.'): value for name, value in state.items()}\n"
        "net.load_state_dict(state)",
        typed="strip `module.` from the names",
    ),
    "unsafe-checkpoint": Cure(
        "import os, torch\nclass Config: pass\n"
        "torch.save(Config(), 'file')\n"
        "if 'CURED' in os.environ: torch.serialization.add_safe_globals([Config])\n"
        "torch.load('file')",
        typed="torch.serialization.add_safe_globals([NAME])",
    ),
    "input-asked-for": Cure(
        "import os\nanswer = os.environ.get('ANSWER') or input('Go on? ')",
        fault="paceline run -p 1 --no-torch script.py",
        typed="--env ANSWER=y",
        cured="paceline run -p 1 --no-torch --env ANSWER=y script.py",
    ),
    "label-out-of-range": Cure(
        "import os, torch\nignored = {'ignore_index': 9} if 'CURED' in os.environ else {}\n"
        "torch.nn.CrossEntropyLoss(**ignored)(torch.zeros(2, 3), torch.tensor([0, 9]))",
        typed="ignore_index",
    ),
    "broken-library": Cure(
        "import ctypes\nctypes.CDLL('libown.so')",
        "cp $(python -c 'import select; print(select.__file__)') folder/libown.so",
        fault="paceline run -p 1 --no-torch script.py",
        typed="--env LD_LIBRARY_PATH=FOLDER",
        cured="paceline run -p 1 --no-torch --env LD_LIBRARY_PATH=/mnt/folder script.py",
    ),
    "crashed": Cure(
        INIT + "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))",
        ALONE + "export TORCH_DISTRIBUTED_DEBUG=DETAIL",
        typed="--unset TORCH_DISTRIBUTED_DEBUG",
        cured="unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT\n"
        "paceline run -p 1 --unset TORCH_DISTRIBUTED_DEBUG script.py",
    ),
    "certificate": Cure(
        "import httpx\nprint(httpx.get('https://localhost:4443/script.py'))",
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out ca.crt -days 1"
        " -subj /CN=localhost -addext subjectAltName=DNS:localhost 2> /dev/null\n"
        "python -c 'import http.server as h, ssl\n"
        "server = h.HTTPServer((\"localhost\", 4443), h.SimpleHTTPRequestHandler)\n"
        "context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)\n"
        "context.load_cert_chain(\"ca.crt\", \"key\")\n"
        "server.socket = context.wrap_socket(server.socket, server_side=True)\n"
        "server.serve_forever()' > /dev/null 2>&1 &\nsleep 1",
        fault="paceline run -p 1 --no-torch script.py",
        typed="--env SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt",
        cured="paceline run -p 1 --no-torch --env SSL_CERT_FILE=/mnt/ca.crt script.py",
    ),
    "mpi-root": Cure(
        fault="mpirun -n 1 true", typed="mpirun --allow-run-as-root SCRIPT",
        cured="mpirun --allow-run-as-root -n 1 true",
    ),
    "not-enough-slots": Cure(
        "", "echo localhost slots=1 > hosts",
        fault="mpirun --allow-run-as-root --hostfile hosts -np 3 true",
        typed="Write `slots=N` on the host lines",
        cured="echo localhost slots=3 > hosts\n"
        "mpirun --allow-run-as-root --hostfile hosts -np 3 true",
    ),
    "uneven-data": Cure(
        INIT + "import torch.utils.data as data\nsamples = range(5)\n"
        "rank = dist.get_rank()\nown = samples[rank::2]\n"
        "if 'CURED' in os.environ: own = data.DistributedSampler(samples)\n"
        "for x in own: dist.all_reduce(torch.ones(1)); print('step', x, flush=True)",
        fault="paceline run -p 2 script.py",
        typed="DistributedSampler(data)",
    ),
}  # fmt: skip


def environment() -> dict[str, str]:
    """Nothing of the user's but where programs are."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
        "USER": "root", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "PACELINE_OPT_REPORT": "no",
        "SITE": SITE,
    }  # fmt: skip


def run(cure: Cure, command: str) -> tuple[int, str]:
    lines = f"{SANDBOX}{cure.setup}\n{command}\nexit $?\n"
    argv = ["unshare", "-mnip", "--fork", "--mount-proc", "--kill-child", "bash", "-c", lines]
    done = subprocess.run(argv, input=cure.script, capture_output=True, text=True,
                          timeout=LIMIT_S, env=environment())  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize("code", CURES)
def test_the_remedy_cures_the_fault(code: str) -> None:
    argv = ["unshare", "-mnip", "--fork", "true"]
    if subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    cure = CURES[code]
    status, output = run(cure, cure.fault)
    assert status != 0, output
    said = re.search(r"^paceline: cause: .* \[([a-z-]+)\]$", output, re.MULTILINE)
    causes = conclude(from_log(output), load_all()).matches
    named = said[1] if said else causes[0][0].code if causes else ""
    assert named == code, output
    remedies = [load(code).sections["Remedy"], *(match.remedy for _, match in causes[:1])]
    assert any(cure.typed in " ".join(remedy.split()) for remedy in remedies)
    status, output = run(cure, cure.cured or f"export CURED=1; {cure.fault}")
    assert status == 0, output
