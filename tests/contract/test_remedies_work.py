"""Tests that remedies of ``paceline explain`` cure the faults for which they are given.

Each case produces a fault with real programs, explains its output, does what the remedy says, and
checks that the same work succeeds. Everything runs in a sandbox with its own network, mounts and
processes.
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
# without garbage collection, importing torch and exiting take a third less time
SITE = "import atexit, gc; gc.disable(); atexit.register(gc.freeze)"
LIMIT_S = 120.0
SINGLE_RANK_ENV = "export RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500\n"
INIT = "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"


@dataclass(frozen=True)
class RemedyCase:
    """A fault, and the remedy that cures it.

    Attributes:
        script: ``script.py``, which the commands run; it may check whether CURED is set.
        setup: Shell commands that cause the fault.
        fault: The command that fails.
        typed: A part of the remedy.
        cured: The remedy and the command that now succeeds; by default ``fault`` with CURED set.
    """

    script: str = ""
    setup: str = ""
    fault: str = "python script.py"
    typed: str = ""
    cured: str = ""


REMEDY_CASES = {
    "disk-full": RemedyCase(
        "open('folder/new', 'wb').write(bytes(1 << 20))",
        "mount -t tmpfs -o size=1500k x folder; head -c 200k /dev/zero > folder/small\n"
        "head -c 1m /dev/zero > folder/old",
        typed="du -xsh FOLDER/* | sort -h",
        cured="rm $(du -xsh folder/* | sort -h | tail -n 1 | cut -f 2); python script.py",
    ),
    "too-many-files": RemedyCase(
        "import os, torch\n"
        "if 'CURED' in os.environ: torch.multiprocessing.set_sharing_strategy('file_system')\n"
        "shared = [torch.ones(1).share_memory_() for _ in range(200)]",
        "ulimit -n 128",
        typed='torch.multiprocessing.set_sharing_strategy("file_system")',
    ),
    "port-taken": RemedyCase(
        INIT,
        SINGLE_RANK_ENV + "python -m http.server --bind 0.0.0.0 29500 > /dev/null 2>&1 &\nsleep 1",
        typed="paceline run",
        cured="unset MASTER_ADDR MASTER_PORT RANK WORLD_SIZE; paceline run -p 1 script.py",
    ),
    "missing-module": RemedyCase(
        "", "mkdir pkg; touch pkg/model.py; echo 'import pkg.model' > pkg/train.py",
        fault="paceline run -p 1 --no-torch pkg/train.py",
        typed="paceline run -m pkg.train",
        cured="paceline run -p 1 --no-torch -m pkg.train",
    ),
    "missing-file": RemedyCase(
        "import os\nopen(os.path.join(os.environ.get('PACELINE_DATA_DIR', '/data'), 'train.csv'))",
        "touch folder/train.csv",
        fault="paceline run -p 1 --no-torch script.py",
        typed="paceline run --data FOLDER SCRIPT",
        cured="paceline run -p 1 --no-torch --data folder script.py",
    ),
    "unused-parameters": RemedyCase(
        INIT + "from torch.nn.parallel import DistributedDataParallel\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.used, self.unused = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)\n"
        "    def forward(self, x): return self.used(x)\n"
        "net = DistributedDataParallel(Net(), find_unused_parameters='CURED' in os.environ)\n"
        "for _ in range(2): net(torch.ones(1, 1)).sum().backward()",
        SINGLE_RANK_ENV,
        typed="DistributedDataParallel(model, find_unused_parameters=True)",
    ),
    "batch-of-one": RemedyCase(
        "import os, torch\nnet, data = torch.nn.BatchNorm1d(2), torch.ones(9, 2)\n"
        "for x in torch.utils.data.DataLoader(data, 4, drop_last='CURED' in os.environ): net(x)",
        typed="DataLoader(data, drop_last=True)",
    ),
    "shared-memory-small": RemedyCase(
        "import torch\n"
        "list(torch.utils.data.DataLoader(torch.ones(8, 1 << 20), batch_size=4, num_workers=1))",
        "mount -o remount,size=1m /dev/shm",
        typed="sudo mount -o remount,size=8g /dev/shm",
        cured="sudo mount -o remount,size=8g /dev/shm; python script.py",
    ),
    "read-as-data": RemedyCase(
        "", "echo 'echo hello from the start-up file' > .bashrc\n"
        "printf '#!/bin/bash\\n. /mnt/.bashrc\\nexec /usr/lib/openssh/sftp-server\\n' > server\n"
        "chmod +x server",
        fault="echo pwd | sftp -b - -D ./server",
        typed="case $- in *i*) ;; *) return ;; esac",
        cured="sed -i '1i case $- in *i*) ;; *) return ;; esac' .bashrc\n"
        "echo pwd | sftp -b - -D ./server",
    ),
    "noexec": RemedyCase(
        "import ctypes\nctypes.CDLL('/mnt/library.so')",
        "cp $(python -c 'import select; print(select.__file__)') library.so\n"
        "mount -o remount,noexec /mnt",
        typed="sudo mount -o remount,exec /tmp",
        cured="sudo mount -o remount,exec /mnt; python script.py",
    ),
    "read-only-disk": RemedyCase(
        "open('/mnt/folder/new', 'w')", "mount -t tmpfs -o ro x folder",
        typed="sudo mount -o remount,rw MOUNT",
        cured="sudo mount -o remount,rw /mnt/folder; python script.py",
    ),
    "blank-in-address": RemedyCase(
        INIT.replace("'gloo'", "'gloo', timeout=__import__('datetime').timedelta(seconds=5)"),
        SINGLE_RANK_ENV + "export RANK=1 WORLD_SIZE=2 MASTER_ADDR='127.0.0.1 '",
        typed="export MASTER_ADDR=$(echo $MASTER_ADDR | xargs)",
        cured="export MASTER_ADDR=$(echo $MASTER_ADDR | xargs); RANK=0 python script.py &\n"
        "python script.py",
    ),
    "interface-missing": RemedyCase(
        INIT + "dist.all_reduce(torch.ones(1))", SINGLE_RANK_ENV + "export GLOO_SOCKET_IFNAME=eth7",
        typed="Leave the variable out: `paceline run` sets it for each node",
        cured="unset GLOO_SOCKET_IFNAME RANK WORLD_SIZE MASTER_ADDR MASTER_PORT\n"
        "paceline run -p 1 script.py",
    ),
    "not-launched": RemedyCase(
        INIT, typed="mpirun -n N paceline env python SCRIPT",
        cured="mpirun --allow-run-as-root --oversubscribe -n 2 paceline env python script.py\n"
        "[ $? = 0 ] && paceline run -p 1 script.py",
    ),
    "unplanned-world": RemedyCase(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', 'tcp://127.0.0.1:29777', rank=0, world_size=1)\n"
        "dist.destroy_process_group()",
        fault="paceline run -p 2 script.py",
        typed="--any-world",
        cured="sed -i s/29777/0/ script.py; paceline run -p 2 --any-world script.py",
    ),
    "local-rank-required": RemedyCase(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int, required=True)\nparser.parse_args()",
        fault="paceline run -p 1 --no-torch script.py",
        typed="paceline run --pass-local-rank SCRIPT",
        cured="paceline run -p 1 --no-torch --pass-local-rank script.py",
    ),
    "wrong-arguments": RemedyCase(
        "import argparse\nargparse.ArgumentParser().parse_args()",
        fault="paceline run --no-torch script.py -p 1",
        typed="options of Paceline go before the script's name",
        cured="paceline run --no-torch -p 1 script.py",
    ),
    "cut-checkpoint": RemedyCase(
        "import glob, torch\ntorch.load(sorted(glob.glob('folder/*.pt'))[-1])",
        "python -c 'import torch; torch.save(torch.ones(999), \"folder/1.pt\")'\n"
        "head -c 2000 folder/1.pt > folder/2.pt",
        typed="Load the checkpoint before it, and delete the broken one",
        cured="rm folder/2.pt; python script.py",
    ),
    "wrong-checkpoint": RemedyCase(
        "import os, torch\nnet = torch.nn.Linear(1, 1)\n"
        "state = {f'module.{name}': value for name, value in net.state_dict().items()}\n"
        "if 'CURED' in os.environ:\n"
        "    state = {name.removeprefix('module.'): value for name, value in state.items()}\n"
        "net.load_state_dict(state)",
        typed="strip `module.` from the names",
    ),
    "unsafe-checkpoint": RemedyCase(
        "import os, torch\nclass Config: pass\n"
        "torch.save(Config(), 'file')\n"
        "if 'CURED' in os.environ: torch.serialization.add_safe_globals([Config])\n"
        "torch.load('file')",
        typed="torch.serialization.add_safe_globals([NAME])",
    ),
    "input-asked-for": RemedyCase(
        "import os\nanswer = os.environ.get('ANSWER') or input('Go on? ')",
        fault="paceline run -p 1 --no-torch script.py",
        typed="--env ANSWER=y",
        cured="paceline run -p 1 --no-torch --env ANSWER=y script.py",
    ),
    "label-out-of-range": RemedyCase(
        "import os, torch\nignored = {'ignore_index': 9} if 'CURED' in os.environ else {}\n"
        "torch.nn.CrossEntropyLoss(**ignored)(torch.zeros(2, 3), torch.tensor([0, 9]))",
        typed="ignore_index",
    ),
    "broken-library": RemedyCase(
        "import ctypes\nctypes.CDLL('libown.so')",
        "cp $(python -c 'import select; print(select.__file__)') folder/libown.so",
        fault="paceline run -p 1 --no-torch script.py",
        typed="--env LD_LIBRARY_PATH=FOLDER",
        cured="paceline run -p 1 --no-torch --env LD_LIBRARY_PATH=/mnt/folder script.py",
    ),
    "crashed": RemedyCase(
        INIT + "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))",
        SINGLE_RANK_ENV + "export TORCH_DISTRIBUTED_DEBUG=DETAIL",
        typed="--unset TORCH_DISTRIBUTED_DEBUG",
        cured="unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT\n"
        "paceline run -p 1 --unset TORCH_DISTRIBUTED_DEBUG script.py",
    ),
    "certificate": RemedyCase(
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
    "mpi-root": RemedyCase(
        fault="mpirun -n 1 true", typed="mpirun --allow-run-as-root SCRIPT",
        cured="mpirun --allow-run-as-root -n 1 true",
    ),
    "not-enough-slots": RemedyCase(
        "", "echo localhost slots=1 > hosts",
        fault="mpirun --allow-run-as-root --hostfile hosts -np 3 true",
        typed="Write `slots=N` on the host lines",
        cured="echo localhost slots=3 > hosts\n"
        "mpirun --allow-run-as-root --hostfile hosts -np 3 true",
    ),
    "uneven-data": RemedyCase(
        INIT + "import torch.utils.data as data\nsamples = range(5)\n"
        "rank = dist.get_rank()\nown = samples[rank::2]\n"
        "if 'CURED' in os.environ: own = data.DistributedSampler(samples)\n"
        "for x in own: dist.all_reduce(torch.ones(1)); print('step', x, flush=True)",
        fault="paceline run -p 2 script.py",
        typed="DistributedSampler(data)",
    ),
}  # fmt: skip


def environment() -> dict[str, str]:
    """Contains nothing of the user's environment except the paths of programs."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
        "USER": "root", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "PACELINE_OPT_REPORT": "no",
        "SITE": SITE,
    }  # fmt: skip


def run(case: RemedyCase, command: str) -> tuple[int, str]:
    lines = f"{SANDBOX}{case.setup}\n{command}\nexit $?\n"
    argv = ["unshare", "-mnip", "--fork", "--mount-proc", "--kill-child", "bash", "-c", lines]
    result = subprocess.run(argv, input=case.script, capture_output=True, text=True,
                          timeout=LIMIT_S, env=environment())  # fmt: skip
    return result.returncode, result.stdout


@pytest.mark.parametrize("code", REMEDY_CASES)
def test_remedy_fixes_fault(code: str) -> None:
    argv = ["unshare", "-mnip", "--fork", "true"]
    if subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    case = REMEDY_CASES[code]
    status, output = run(case, case.fault)
    assert status != 0, output
    cause_line = re.search(r"^paceline: cause: .* \[([a-z-]+)\]$", output, re.MULTILINE)
    causes = conclude(from_log(output), load_all()).matches
    cause = cause_line[1] if cause_line else causes[0][0].code if causes else ""
    assert cause == code, output
    remedies = [load(code).sections["Remedy"], *(match.remedy for _, match in causes[:1])]
    assert any(case.typed in " ".join(remedy.split()) for remedy in remedies)
    status, output = run(case, case.cured or f"export CURED=1; {case.fault}")
    assert status == 0, output
