"""Forecast step times of 3, 4 and 8 hosts from a probe of two, against measured ones.

Each case is a model on a link. Hosts are network namespaces behind a switch, and tbf shapes each
link at both ends. paceline.train trains with DDP over gloo, with gradients of the model's real
size. **Computing is emulated**: every layer sleeps for as long as a calibrated host would compute,
in the forward and backward passes, so that more hosts than cores can be measured. Reading data is
emulated likewise. The probe (PACELINE_PROBE) and the step model (paceline.bench.forecast) are
Paceline's.

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
import torch._dynamo  # as the first optimizer does; here once for all ranks
from torch import Tensor, nn

from paceline import train as training
from paceline.bench import forecast, step_model

BATCH = 64
SAMPLES = 100_000
LIMIT_S = 400.0  # per run
TOLERANCE = 0.1
QUEUE = "400ms"  # per port: a short queue drops the first burst of an idle sender
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
UNSHARED = "PACELINE_FORECAST_BENCH_APART"


@dataclass(frozen=True)
class Case:
    """A model: shapes of its parameters, and the seconds of a step: fixed, and for each sample."""

    widths: tuple[tuple[int, ...], ...]
    fixed: float
    per_sample: float
    data: float = 0.0

    @property
    def bytes(self) -> int:
        return 4 * sum(torch.Size(shape).numel() for shape in self.widths)


def _transformer(width: int, layers: int, vocabulary: int, cross: bool = False) -> Any:
    """Shapes of parameters of a transformer: embedding, blocks, output."""
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    blocks = [(width,), *block, (width,), *([(4 * width, width)] if cross else [])]
    return ((vocabulary, width), *blocks * layers, (vocabulary, width))


MODELS = {
    # a CNN for small images; little to send, little to compute
    "cnn": Case(((32, 9), (64, 288), (128, 576), (128, 1152), (10, 2048)), 0.004, 0.0012),
    # a byte-level language model of 1.9 million parameters
    "lm": Case(_transformer(196, 4, 256), 0.008, 0.004),
    # a transformer of the translation recipe, 1.8 million parameters, many words
    "translation": Case(_transformer(128, 4, 3000, cross=True), 0.060, 0.0015),
    # photos, decoded on demand
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
        self.layers = nn.ParameterList([torch.zeros(shape) for shape in case.widths])

    def forward(self, x: Tensor) -> Tensor:
        seconds = (self.case.fixed + self.case.per_sample * len(x)) / len(self.layers)
        for weight in self.layers:
            x = _Sleep.apply(x, weight, seconds)  # type: ignore[no-untyped-call]
        return x.mean(1)


class Data:
    """Samples that take ``seconds`` each to read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, ids: Any, draws: Any) -> tuple[Tensor]:
        time.sleep(self.seconds * len(ids))
        return (torch.ones(len(ids), 4, requires_grad=True),)


def train(name: str) -> None:
    """The training script of one rank."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: for exact sleeps
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


def run_command(*argv: str, check: bool = True) -> None:
    completed = subprocess.run(argv, capture_output=True, text=True)
    if check and completed.returncode:
        raise SystemExit(f"{' '.join(argv)}: {completed.stderr.strip()}")


def burst(rate: str) -> str:
    bits = float(rate.removesuffix("mbit").removesuffix("gbit")) * (
        1e9 if rate.endswith("gbit") else 1e6
    )
    return str(max(16_000, int(bits / 8 * 0.004)))


class VirtualNetwork:
    """``hosts`` network namespaces behind a switch."""

    def __init__(self, name: str, hosts: int, rate: str) -> None:
        self.switch, self.hosts = f"fc{name}s", [f"fc{name}h{n}" for n in range(hosts)]
        run_command("ip", "netns", "add", self.switch)
        run_command("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        run_command("ip", "-n", self.switch, "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts):
            run_command("ip", "netns", "add", host)
            port = f"p{number}"
            run_command("ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer",
                        "name", "eth0", "netns", host)  # fmt: skip
            run_command("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
            run_command("ip", "-n", host, "addr", "add", f"10.9.0.{number + 1}/24", "dev", "eth0")
            run_command("ip", "-n", host, "link", "set", "eth0", "up")
            run_command("ip", "-n", host, "link", "set", "lo", "up")
            if rate:
                bucket = ("tbf", "rate", rate, "burst", burst(rate), "latency", QUEUE)
                run_command("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", *bucket)
                run_command("tc", "-n", self.switch, "qdisc", "add", "dev", port, "root", *bucket)

    def close(self) -> None:
        for name in [*self.hosts, self.switch]:
            run_command("ip", "netns", "del", name, check=False)


def enter(namespace: str) -> None:
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def run(
    cluster: VirtualNetwork, model: str, hosts: int, parts: list[float], seconds: float
) -> dict[str, Any]:
    """Run the script on the first hosts. Returns steps.json of rank 0."""
    with tempfile.TemporaryDirectory(prefix="paceline-forecast-") as folder:
        probe = json.dumps({"batches": [], "parts": parts, "seconds": seconds})
        os.environ.update(PACELINE_PROBE=probe, PACELINE_RUN_DIR=folder)
        output_file = Path(folder, "output")
        failed = start_ranks(model, cluster.hosts[:hosts], output_file)
        path = Path(folder) / "steps.json"
        if failed or not path.exists():
            raise RuntimeError(f"{model} on {hosts}: {output_file.read_text()[-3000:]}")
        return dict(json.loads(path.read_text()))


def start_ranks(model: str, namespaces: list[str], output_file: Path) -> bool:
    """Fork a rank into every namespace and wait for all. Returns whether one failed."""
    children = [_rank(model, rank, namespaces, output_file) for rank in range(len(namespaces))]
    failed, deadline = False, time.monotonic() + LIMIT_S
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            children.remove(pid)
            failed = failed or bool(status)
        if failed or time.monotonic() > deadline:
            for remaining in children:
                os.kill(remaining, signal.SIGKILL)
                os.waitpid(remaining, 0)
            return True
        time.sleep(0.02)
    return failed


def _rank(model: str, rank: int, namespaces: list[str], output_file: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        output = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        enter(namespaces[rank])
        with contextlib.suppress(OSError):  # the usual algorithm, if the kernel has it
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
    """Measure one case: the probe, its forecasts, and the steps of more hosts."""
    start = time.monotonic()
    cluster = VirtualNetwork(
        f"{list(MODELS).index(model)}{list(LINKS).index(link)}", max(hosts), LINKS[link]
    )
    try:
        largest = max(hosts)
        single = step_model.Probe.read(run(cluster, model, 1, [1.0, 0.5, 1 / largest], seconds))
        pair = step_model.Probe.read(run(cluster, model, 2, [1.0, 2 / largest], seconds))
        model_of_step = step_model.fit_model({"n1": single}, pair)
        forecasts = {f.hosts: f for f in forecast.forecast(model_of_step, [1, 2, *hosts])}
        shares = step_model.Probe.read(
            run(cluster, model, 1, [1 / count for count in hosts], seconds)
        )
        single_step_s = {timing.batch: timing.seconds for timing in shares.timings}
        rows = []
        for count in hosts:
            probe = step_model.Probe.read(run(cluster, model, count, [1.0], seconds))
            single_s = single_step_s[round(BATCH / count)]
            rows.append(compare(MODELS[model], forecasts[count], count, probe.timings[0], single_s))
    finally:
        cluster.close()
    return {
        "model": model, "link": link, "megabytes": MODELS[model].bytes / 1e6, "rows": rows,
        "found": forecast.to_json(list(forecasts.values()), model_of_step)["model"],
        "pair": [{"batch": t.batch, "seconds": t.seconds} for t in pair.timings],
        "took": time.monotonic() - start,
    }  # fmt: skip


def compare(case: Case, prediction: forecast.Forecast, hosts: int, measured: step_model.StepTiming,
             single_s: float) -> dict[str, Any]:  # fmt: skip
    """Compare a forecast with the measured step.

    Args:
        case: The emulated costs.
        told: The forecast.
        hosts: Number of hosts.
        came: The measured step.
        alone: Seconds of a step of one host with the same share of the batch. The part that is not
            emulated does not depend on the samples; the rest of the measured step is the link's.
    """
    share = BATCH / hosts
    parts = {"computing": case.per_sample * share, "data": case.data * share}
    parts["small batch"] = single_s - sum(parts.values())
    parts["link"] = measured.seconds - single_s
    limiting_part = max(parts, key=parts.__getitem__)
    is_close = sorted(parts.values())[-1] - parts[prediction.step.limit] < 0.05 * measured.seconds
    return {
        "hosts": hosts, "alone": single_s,
        "forecast": prediction.step.seconds, "low": prediction.step.low,
        "high": prediction.step.high, "came": measured.seconds, "came_spread": measured.spread,
        "off": prediction.step.seconds / measured.seconds - 1, "limit": prediction.step.limit,
        "true_limit": limiting_part, "limit_right": prediction.step.limit == limiting_part,
        "limit_close": is_close, "declined": prediction.declined,
        "inside": prediction.step.low <= measured.seconds <= prediction.step.high,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--hosts", default="3,4,8")
    parser.add_argument("--seconds", type=float, default=3.0, help="of steps in each run")
    parser.add_argument("--at-once", type=int, default=1, help="cases on slow links at a time")
    parser.add_argument("--at-once-fast", type=int, default=1, help="on the other links")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    if not os.environ.get(UNSHARED):  # in namespaces of its own, which end with this process
        os.environ[UNSHARED] = "1"
        command = [sys.executable, *sys.argv]
        os.execvp("unshare", ["unshare", "--mount", "--net", *command])
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            raise SystemExit(f"{tool} is missing")
    Path("/run/netns").mkdir(exist_ok=True)
    run_command("mount", "-t", "tmpfs", "none", "/run/netns")
    options.out.mkdir(parents=True, exist_ok=True)
    pairs = list(itertools.product(options.models.split(","), options.links.split(",")))
    slow_pairs = [pair for pair in pairs if pair[1] in ("20mbit", "100mbit")]
    slow_pairs.sort(key=lambda pair: (pair[1] != "20mbit", -MODELS[pair[0]].bytes))
    fast_pairs = [pair for pair in pairs if pair not in slow_pairs]
    with tempfile.TemporaryDirectory(prefix="paceline-forecast-") as folder:
        results_folder = Path(folder)
        workers = [_worker(slow_pairs, options, results_folder) for _ in range(options.at_once)]
        workers += [
            _worker(fast_pairs, options, results_folder) for _ in range(options.at_once_fast)
        ]
        for worker in workers:
            os.waitpid(worker, 0)
        print(write(options.out, results_folder))


def _worker(queue: list[tuple[str, str]], options: argparse.Namespace, results_folder: Path) -> int:
    """Fork a process that measures one case after another; ranks are its forks. Returns its PID."""
    pid = os.fork()
    if pid:
        return pid
    hosts = [int(count) for count in options.hosts.split(",")]
    for pair in queue:
        name = "-".join(pair)
        try:
            (results_folder / name).mkdir()
        except FileExistsError:
            continue  # another worker measures it
        try:
            result = measure(*pair, hosts, options.seconds)
            text = json.dumps(result)
            for row in result["rows"]:
                print(*pair, f"{row['hosts']}: forecast {row['forecast']:.3f} measured"
                      f" {row['came']:.3f} ({row['off']:+.1%}), {row['limit']} /"
                      f" {row['true_limit']}", flush=True)  # fmt: skip
        except (RuntimeError, SystemExit, OSError, ValueError) as error:
            print(f"{name}: {error}", flush=True)
            text = json.dumps(f"{name}: {error}")
        (results_folder / f"{name}.json").write_text(text)
        with contextlib.suppress(OSError):
            write(options.out, results_folder)
    os._exit(0)


def write(folder: Path, results_folder: Path) -> str:
    """Write the results so far; returns the Markdown page."""
    contents = [json.loads(path.read_text()) for path in sorted(results_folder.glob("*.json"))]
    results = [item for item in contents if isinstance(item, dict)]
    problems = [item for item in contents if isinstance(item, str)]
    (folder / "forecast.json").write_text(json.dumps([results, problems], indent=1))
    rows = [(case, row) for case in results for row in case["rows"]]
    num_within = sum(abs(row["off"]) <= TOLERANCE for _, row in rows)
    num_named = sum(row["limit_right"] or row["limit_close"] for _, row in rows)
    lines = [
        f"# Forecast of more hosts from a probe of two, {datetime.date.today()}",
        "",
        f"{os.cpu_count()} CPUs, torch {torch.__version__}; computing and reading are emulated by"
        " sleep, messages are real; hosts are network namespaces, links shaped by tbf.",
        "",
        f"Within {TOLERANCE:.0%}: {num_within} of {len(rows)}. Limit named correctly:"
        f" {num_named} of {len(rows)} ({sum(row['limit_right'] for _, row in rows)}"
        f" without ties of 5 % of the step). Inside the error bar:"
        f" {sum(row['inside'] for _, row in rows)}."
        f" Declined: {sum(bool(row['declined']) for _, row in rows)}.",
        "",
        "| model | MB | link | hosts | forecast s | error bar | measured s | error | limit |"
        " true |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    positions = {name: position for position, name in enumerate([*LINKS, *MODELS])}
    for case, row in sorted(
        rows, key=lambda pair: (positions[pair[0]["link"]], positions[pair[0]["model"]])
    ):
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
