"""A forecast of 3, 4 and 8 hosts from a probe of two, beside what 3, 4 and 8 hosts really take.

Each case is a model on a link: hosts are network namespaces behind a switch, each link is shaped
by tbf at both ends, and what trains is paceline.train with DDP over gloo, with real gradients of
the model's real size. **Computing is emulated**: every layer sleeps for as long as a calibrated
host would compute, forwards and backwards, so that more hosts than cores can be measured; reading
data likewise. The probe is the product's own (PACELINE_PROBE), so is the model
(paceline.bench.forecast).

    sudo python bench/forecast/forecast.py [--models lm,cnn] [--links 20mbit] [--hosts 3,4,8]
        [--at-once N] [--at-once-fast N] [--out FOLDER]

Needs root, ip and tc. Writes forecast.json and forecast.md.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
import torch._dynamo  # as the first optimizer does: once for all ranks
from torch import Tensor, nn

from paceline import train as training
from paceline.bench import forecast, step_model

BATCH = 64
SAMPLES = 100_000
LIMIT_S = 400.0  # of one run
TOLERANCE = 0.1
QUEUE = "400ms"  # of a port: a short one drops what a sender at rest sends at once
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
APART = "PACELINE_FORECAST_BENCH_APART"


@dataclass(frozen=True)
class Case:
    """A model: its parameters, and what a host needs for a step of it, in seconds."""

    widths: tuple[tuple[int, ...], ...]
    fixed: float
    each: float
    data: float = 0.0

    @property
    def bytes(self) -> int:
        return 4 * sum(torch.Size(one).numel() for one in self.widths)


def _transformer(width: int, layers: int, words: int, cross: bool = False) -> Any:
    """Shapes of parameters of a transformer: embedding, blocks, output."""
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    blocks = [(width,), *block, (width,), *([(4 * width, width)] if cross else [])]
    return ((words, width), *blocks * layers, (words, width))


MODELS = {
    # a CNN for small images; little to send, little to compute
    "cnn": Case(((32, 9), (64, 288), (128, 576), (128, 1152), (10, 2048)), 0.004, 0.0012),
    # a byte-level language model of 1.9 million parameters
    "lm": Case(_transformer(196, 4, 256), 0.008, 0.004),
    # a transformer of the translation recipe, 1.8 million parameters, many words
    "translation": Case(_transformer(128, 4, 3000, cross=True), 0.060, 0.0015),
    # photos, decoded as they are needed
    "photos": Case(((64, 147), *((64, 576),) * 4, *((128, 1152),) * 3, (100, 128)), 0.010, 0.003,
                   data=0.006),
}  # fmt: skip
LINKS = {"unshaped": "", "1gbit": "1gbit", "100mbit": "100mbit", "20mbit": "20mbit"}


# -- a host --------------------------------------------------------------------------------


class _Sleep(torch.autograd.Function):
    """A layer whose computing is emulated: one third forwards, two thirds backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = seconds, weight.shape
        time.sleep(seconds / 3)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds * 2 / 3)
        return grads[0], torch.zeros(ctx.shape), None


class Emulated(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.layers = nn.ParameterList([torch.zeros(one) for one in case.widths])

    def forward(self, x: Tensor) -> Tensor:
        seconds = (self.case.fixed + self.case.each * len(x)) / len(self.layers)
        for weight in self.layers:
            x = _Sleep.apply(x, weight, seconds)  # type: ignore[no-untyped-call]
        return x.mean(1)


class Data:
    """Samples that take a while to be read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, ids: Any, draws: Any) -> tuple[Tensor]:
        time.sleep(self.seconds * len(ids))
        return (torch.ones(len(ids), 4, requires_grad=True),)


def train(name: str) -> None:
    """The script of the user."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: sleeps end when they should
    case = MODELS[name]
    with training.join(backend="gloo", device="cpu", log_every=10_000) as session:
        network = Emulated(case)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        model = session.prepare(network, optimizer)
        loader = session.loader(Data(case.data), BATCH)
        for _ in session.epochs(loader, 3):
            for (x,) in loader:
                session.step(model(x))


# -- the network ---------------------------------------------------------------------------


def sh(*words: str, check: bool = True) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")


def burst(rate: str) -> str:
    bits = float(rate.removesuffix("mbit").removesuffix("gbit")) * (
        1e9 if rate.endswith("gbit") else 1e6
    )
    return str(max(16_000, int(bits / 8 * 0.004)))


class Net:
    """So many hosts behind a switch."""

    def __init__(self, name: str, hosts: int, rate: str) -> None:
        self.switch, self.hosts = f"fc{name}s", [f"fc{name}h{n}" for n in range(hosts)]
        sh("ip", "netns", "add", self.switch)
        sh("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", self.switch, "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts):
            sh("ip", "netns", "add", host)
            port = f"p{number}"
            sh("ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer", "name",
               "eth0", "netns", host)  # fmt: skip
            sh("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
            sh("ip", "-n", host, "addr", "add", f"10.9.0.{number + 1}/24", "dev", "eth0")
            sh("ip", "-n", host, "link", "set", "eth0", "up")
            sh("ip", "-n", host, "link", "set", "lo", "up")
            if rate:
                bucket = ("tbf", "rate", rate, "burst", burst(rate), "latency", QUEUE)
                sh("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", *bucket)
                sh("tc", "-n", self.switch, "qdisc", "add", "dev", port, "root", *bucket)

    def close(self) -> None:
        for name in [*self.hosts, self.switch]:
            sh("ip", "netns", "del", name, check=False)


def enter(namespace: str) -> None:
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def run(net: Net, model: str, hosts: int, parts: list[float], seconds: float) -> dict[str, Any]:
    """The script on the first hosts: steps.json of rank 0. torch is imported already."""
    with tempfile.TemporaryDirectory(prefix="paceline-forecast-") as folder:
        probe = json.dumps({"batches": [], "parts": parts, "seconds": seconds})
        os.environ.update(PACELINE_PROBE=probe, PACELINE_RUN_DIR=folder)
        said = Path(folder, "said")
        failed = start_ranks(model, net.hosts[:hosts], said)
        path = Path(folder) / "steps.json"
        if failed or not path.exists():
            raise RuntimeError(f"{model} on {hosts}: {said.read_text()[-3000:]}")
        return dict(json.loads(path.read_text()))


def start_ranks(model: str, namespaces: list[str], said: Path) -> bool:
    """Forks a rank into every namespace, and waits for all; True when one failed."""
    children = [_rank(model, rank, namespaces, said) for rank in range(len(namespaces))]
    failed, until = False, time.monotonic() + LIMIT_S
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            children.remove(child)
            failed = failed or bool(status)
        if failed or time.monotonic() > until:
            for other in children:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            return True
        time.sleep(0.02)
    return failed


def _rank(model: str, rank: int, namespaces: list[str], said: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        enter(namespaces[rank])
        with contextlib.suppress(OSError):  # that of most machines, where it is known
            CONGESTION.write_text("cubic")
        os.environ.update(
            RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(len(namespaces)),
            LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank), MASTER_ADDR="10.9.0.1",
            MASTER_PORT="29500", GLOO_SOCKET_IFNAME="eth0", PACELINE_HOST=f"n{rank + 1}",
        )  # fmt: skip
        train(model)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


# -- the cases -----------------------------------------------------------------------------


def measure(model: str, link: str, hosts: list[int], seconds: float) -> dict[str, Any]:
    """One case: the probe, its forecasts, and what more hosts really take."""
    began = time.monotonic()
    net = Net(f"{list(MODELS).index(model)}{list(LINKS).index(link)}", max(hosts), LINKS[link])
    try:
        most = max(hosts)
        one = step_model.Probe.read(run(net, model, 1, [1.0, 0.5, 1 / most], seconds))
        two = step_model.Probe.read(run(net, model, 2, [1.0, 2 / most], seconds))
        known = step_model.fit_model({"n1": one}, two)
        told = {f.hosts: f for f in forecast.forecast(known, [1, 2, *hosts])}
        shares = step_model.Probe.read(run(net, model, 1, [1 / count for count in hosts], seconds))
        alone = {timed.batch: timed.seconds for timed in shares.timings}
        rows = []
        for count in hosts:
            said = step_model.Probe.read(run(net, model, count, [1.0], seconds))
            itself = alone[round(BATCH / count)]
            rows.append(compared(MODELS[model], told[count], count, said.timings[0], itself))
    finally:
        net.close()
    return {
        "model": model, "link": link, "megabytes": MODELS[model].bytes / 1e6, "rows": rows,
        "found": forecast.to_json(list(told.values()), known)["model"],
        "pair": [{"batch": t.batch, "seconds": t.seconds} for t in two.timings],
        "took": time.monotonic() - began,
    }  # fmt: skip


def compared(case: Case, told: forecast.Forecast, hosts: int, came: step_model.StepTiming,
             alone: float) -> dict[str, Any]:  # fmt: skip
    """A forecast beside what came.

    Args:
        case: What was planted.
        told: The forecast.
        hosts: Their number.
        came: What they took.
        alone: Seconds of a step of one host with the share that each of them has: all that is not
            planted in it does not follow the samples; what they take longer is the link's.
    """
    share = BATCH / hosts
    parts = {"computing": case.each * share, "data": case.data * share}
    parts["small batch"] = alone - sum(parts.values())
    parts["link"] = came.seconds - alone
    limit = max(parts, key=parts.__getitem__)
    close = sorted(parts.values())[-1] - parts[told.step.limit] < 0.05 * came.seconds
    return {
        "hosts": hosts, "alone": alone, "forecast": told.step.seconds, "low": told.step.low,
        "high": told.step.high, "came": came.seconds, "came_spread": came.spread,
        "off": told.step.seconds / came.seconds - 1, "limit": told.step.limit, "true_limit": limit,
        "limit_right": told.step.limit == limit, "limit_close": close, "declined": told.declined,
        "inside": told.step.low <= came.seconds <= told.step.high,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--hosts", default="3,4,8")
    parser.add_argument("--seconds", type=float, default=3.0, help="of steps, in each run")
    parser.add_argument("--at-once", type=int, default=1, help="cases on slow links at a time")
    parser.add_argument("--at-once-fast", type=int, default=1, help="on the other links")
    parser.add_argument("--out", type=Path, default=Path())
    asked = parser.parse_args()
    if not os.environ.get(APART):  # what is made here is seen by nobody, and ends with us
        os.environ[APART] = "1"
        words = [sys.executable, *sys.argv]
        os.execvp("unshare", ["unshare", "--mount", "--net", *words])
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            raise SystemExit(f"{tool} is missing")
    Path("/run/netns").mkdir(exist_ok=True)
    sh("mount", "-t", "tmpfs", "none", "/run/netns")
    asked.out.mkdir(parents=True, exist_ok=True)
    pairs = list(itertools.product(asked.models.split(","), asked.links.split(",")))
    slow = [pair for pair in pairs if pair[1] in ("20mbit", "100mbit")]
    slow.sort(key=lambda pair: (pair[1] != "20mbit", -MODELS[pair[0]].bytes))
    fast = [pair for pair in pairs if pair not in slow]
    with tempfile.TemporaryDirectory(prefix="paceline-forecast-") as folder:
        kept = Path(folder)
        workers = [_worker(slow, asked, kept) for _ in range(asked.at_once)]
        workers += [_worker(fast, asked, kept) for _ in range(asked.at_once_fast)]
        for worker in workers:
            os.waitpid(worker, 0)
        print(write(asked.out, kept))


def _worker(queue: list[tuple[str, str]], asked: argparse.Namespace, kept: Path) -> int:
    """A process that measures one case after the other; ranks are its forks."""
    child = os.fork()
    if child:
        return child
    hosts = [int(one) for one in asked.hosts.split(",")]
    for pair in queue:
        name = "-".join(pair)
        try:
            (kept / name).mkdir()
        except FileExistsError:
            continue  # another has it
        try:
            found = measure(*pair, hosts, asked.seconds)
            text = json.dumps(found)
            for row in found["rows"]:
                print(*pair, f"{row['hosts']}: forecast {row['forecast']:.3f} came"
                      f" {row['came']:.3f} ({row['off']:+.1%}), {row['limit']} /"
                      f" {row['true_limit']}", flush=True)  # fmt: skip
        except (RuntimeError, SystemExit, OSError, ValueError) as error:
            print(f"{name}: {error}", flush=True)
            text = json.dumps(f"{name}: {error}")
        (kept / f"{name}.json").write_text(text)
        with contextlib.suppress(OSError):
            write(asked.out, kept)
    os._exit(0)


def write(folder: Path, kept: Path) -> str:
    """The result so far."""
    every = [json.loads(path.read_text()) for path in sorted(kept.glob("*.json"))]
    results = [one for one in every if isinstance(one, dict)]
    problems = [one for one in every if isinstance(one, str)]
    (folder / "forecast.json").write_text(json.dumps([results, problems], indent=1))
    rows = [(case, row) for case in results for row in case["rows"]]
    near = sum(abs(row["off"]) <= TOLERANCE for _, row in rows)
    named = sum(row["limit_right"] or row["limit_close"] for _, row in rows)
    lines = [
        f"# Forecast of more hosts from a probe of two, {datetime.date.today()}",
        "",
        f"{os.cpu_count()} CPUs, torch {torch.__version__}; computing and reading are emulated by"
        " sleep, what is sent is real; hosts are network namespaces, links shaped by tbf.",
        "",
        f"Within {TOLERANCE:.0%}: {near} of {len(rows)}. Limit named rightly: {named} of"
        f" {len(rows)} ({sum(row['limit_right'] for _, row in rows)} without ties of 5 % of the"
        f" step). Inside the error bar: {sum(row['inside'] for _, row in rows)}."
        f" Declined: {sum(bool(row['declined']) for _, row in rows)}.",
        "",
        "| model | MB | link | hosts | forecast s | error bar | came s | off | limit | true |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    order = {name: at for at, name in enumerate([*LINKS, *MODELS])}
    for case, row in sorted(rows, key=lambda one: (order[one[0]["link"]], order[one[0]["model"]])):
        lines.append(
            f"| {case['model']} | {case['megabytes']:.1f} | {case['link']} | {row['hosts']} |"
            f" {row['forecast']:.3f} | {row['low']:.3f} … {row['high']:.3f} | {row['came']:.3f} |"
            f" {row['off']:+.1%} | {row['limit']} | {row['true_limit']} |"
        )
    text = "\n".join([*lines, "", *problems]) + "\n"
    (folder / "forecast.md").write_text(text)
    return text


if __name__ == "__main__":
    main()
