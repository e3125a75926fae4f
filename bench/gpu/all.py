"""Runs all checks and benchmarks of several NCCL ranks on one NVIDIA GPU, and writes one page.

    bench/gpu/all.sh OUT [--dry] [--seconds 480] [PART…]

Parts: environment, recovery, ranks, resume, cost, tests, communication, errors, straggler; by
default all of them, in this order. Cases with a result in OUT are not run again, except cases that
--seconds cut off and cases of parts named on the command line. NCCL refuses two ranks on one GPU
only within a host, and treats each NCCL_HOSTID as a host. The ranks then communicate over loopback
sockets, so times are not those of several GPUs.

Needs this checkout, torch and Paceline's dependencies, but no network and no ssh. With --dry all
ranks compute on CPUs, over gloo or the tests' stand-in for NCCL. Each case runs in its own
processes with a time limit. Its output is in OUT/logs, its result in OUT/PART.json, and all results
in OUT/result.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
EXACT = 1e-9
"""Largest difference of float64 parameters that counts as rounding."""
MIN_CASE_S = 5.0  # a case does not start with less
CUT = "cut off by --seconds"
Result = dict[str, Any]


@dataclass
class Case:
    """Processes that run together.

    Attributes:
        name: Name of the case and of its files.
        argv: Arguments of Python; ``{rank}`` and ``{port}`` are filled in.
        ranks: Number of processes started with torchrun's variables; 0 for one without them.
        env: Further variables; ``{rank}`` is filled in.
        limit_s: Seconds after which the remaining processes are ended.
        judge: Returns the result.
        act: Called with the processes after their start.
        clears: Folders that are removed before the start.
    """

    name: str
    argv: Sequence[str]
    ranks: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 90.0
    judge: Callable[[], Result] = dict
    act: Callable[[list[subprocess.Popen[bytes]]], None] = lambda processes: None
    clears: Sequence[Path] = ()


class Bench:
    """Runs cases and stores their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path = options.out
        self.dry: bool = options.dry
        self.deadline = time.monotonic() + options.seconds
        self.device = "cpu" if options.dry else "cuda"
        self.repeats = bool(options.parts)
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        self.work = self.out / "work"
        self._lock = threading.Lock()  # held while results are written

    def log(self, name: str, rank: int = 0) -> Path:
        return self.out / "logs" / f"{name}.{rank}.log"

    def text(self, name: str, rank: int = 0) -> str:
        return self.log(name, rank).read_text(errors="replace")

    def run_all(self, part: str, cases: Sequence[Case], parallel: int = 4) -> list[Result]:
        """Run cases, ``parallel`` at a time, and add the result of each to those of the part.

        Cases with a complete result are skipped, unless the part is to be repeated.
        """
        file = self.out / f"{part}.json"
        results = self._results(part)
        finished = {} if self.repeats else {r["case"] for r in results if CUT not in r}
        cases = [case for case in cases if case.name not in finished]
        names = {case.name for case in cases}
        results = [result for result in results if result["case"] not in names]

        def run(case: Case) -> None:
            result = self.run(case)
            with self._lock:
                results.append(result)
                _write(file, json.dumps(results, indent=1))
                print(json.dumps(result)[:400], flush=True)
                self.write_page()

        with ThreadPoolExecutor(min(2, parallel) if self.dry else parallel) as pool:
            list(pool.map(run, cases))
        return results

    def _results(self, part: str) -> list[Result]:
        """Results of a part so far; none if their file cannot be read."""
        try:
            return list(json.loads((self.out / f"{part}.json").read_text()))
        except (OSError, ValueError):
            return []

    def run(self, case: Case) -> Result:
        start, port = time.monotonic(), _free_port()
        limit_s = min(case.limit_s, self.deadline - start)
        result: Result = {"case": case.name, "ranks": case.ranks}
        if limit_s < MIN_CASE_S:
            return result | {"exit": "no time was left", CUT: True}
        for folder in case.clears:
            shutil.rmtree(folder, ignore_errors=True)
        processes = [self._start(case, rank, port) for rank in range(max(1, case.ranks))]
        end = start + limit_s
        with contextlib.suppress(Exception):
            case.act(processes)
        while time.monotonic() < end and any(p.poll() is None for p in processes):
            time.sleep(0.05)
        overrunning = [rank for rank, process in enumerate(processes) if process.poll() is None]
        for rank in overrunning:  # the launcher ends its ranks
            with contextlib.suppress(OSError):
                os.killpg(processes[rank].pid, signal.SIGINT)
        end = time.monotonic() + (8 if overrunning else 1)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        result |= {
            "seconds": round(time.monotonic() - start, 1),
            "exit": [process.returncode for process in processes],
        }
        if overrunning:
            result["ended at the limit"] = overrunning
            if limit_s < case.limit_s:
                result[CUT] = True
        try:
            result |= case.judge()
        except Exception as error:  # a file may be missing
            result["not judged"] = f"{type(error).__name__}: {error}"[:300]
        return result

    def _start(self, case: Case, rank: int, port: int) -> subprocess.Popen[bytes]:
        fill = {"rank": rank, "port": port}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **SOCKETS}
        env["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        if case.ranks:
            env |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(case.ranks),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "NCCL_HOSTID": f"host{rank}",
            }
        env |= {name: value.format(**fill) for name, value in case.env.items()}
        argv = [sys.executable, *(word.format(**fill) for word in case.argv)]
        with self.log(case.name, rank).open("wb") as log:
            return subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.out,
                start_new_session=True,
            )

    # -- the page --------------------------------------------------------------------------

    def write_page(self) -> None:
        lines = ["# Several NCCL ranks on one GPU" + (", on CPUs (--dry)" if self.dry else "")]
        description = self.out / "environment.txt"
        if description.exists():
            lines += ["", "```", description.read_text().strip(), "```"]
        for part in PARTS:
            results = self._results(part)
            if not results:
                continue
            names = list(dict.fromkeys(name for result in results for name in result))
            lines += ["", f"## {part.capitalize()}", "", f"| {' | '.join(names)} |"]
            lines += ["|" + "---|" * len(names)]
            for result in results:
                cells = (_cell(result.get(name, "")) for name in names)
                lines.append(f"| {' | '.join(cells)} |")
        _write(self.out / "result.md", "\n".join(lines) + "\n")


def _write(file: Path, text: str) -> None:
    """Replace a file atomically, because the machine may be taken away at any moment."""
    temporary = file.with_name(f"{file.name}.new")
    temporary.write_text(text)
    temporary.replace(file)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "/").replace("\n", " ")[:400]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def difference(first: Any, second: Any) -> float:
    """Returns the largest difference between the tensors of two nested states."""
    import torch

    if isinstance(first, torch.Tensor):
        return float((first.double().cpu() - second.double().cpu()).abs().max())
    if isinstance(first, Mapping):
        return max((difference(first[name], second[name]) for name in first), default=0.0)
    return 0.0


# -- parts ---------------------------------------------------------------------------------


def environment(bench: Bench) -> None:
    """Describe this machine."""
    if (bench.out / "environment.txt").exists() and not bench.repeats:
        return
    code = (
        "import torch, platform; print('Python', platform.python_version(), 'torch',"
        " torch.__version__); print('NCCL', torch.cuda.nccl.version()) if"
        " torch.cuda.is_available() else print('no GPU'); print('get_error', hasattr("
        "getattr(torch.distributed, 'ProcessGroupNCCL', 0), 'get_error'))"
    )
    commands = (["nvidia-smi", "-L"], ["uname", "-a"], ["nproc"], [sys.executable, "-c", code])
    lines = []
    for command in commands:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            completed = subprocess.run(
                command, capture_output=True, text=True, timeout=60, check=False
            )
            lines.append(completed.stdout.strip())
    (bench.out / "environment.txt").write_text("\n".join(lines) + "\n")
    (bench.out / "environment.json").write_text("[]")
    bench.write_page()


def _trial(bench: Bench, name: str, *options: str) -> list[str]:
    """Arguments of lost_rank.py."""
    dry = ["--dry", "--pause=0.05"] if bench.dry else []
    return [str(HERE / "lost_rank.py"), str(bench.work / name), *dry, *options]


def _launched(bench: Bench, name: str, *options: str, handling: str = "") -> Case:
    """lost_rank.py with three ranks under the launcher."""
    run = bench.work / f"{name}.run"
    launcher = ["-m", "paceline", "run", "-p", "3", f"--run-dir={run}", "--check=none"]
    env = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": f"{bench.out}/logs/{name}.nccl.%p.log",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{bench.out}/logs/{name}.fr.",
    }
    if handling:
        launcher.append(f"--env=TORCH_NCCL_ASYNC_ERROR_HANDLING={handling}")
    argv = [*launcher, "--show=all", *_trial(bench, name, *options)]
    clears = [run, bench.work / name]
    return Case(
        name, argv, env=env, limit_s=75, judge=lambda: judge_run(bench, name), clears=clears
    )


def recovery(bench: Bench) -> None:
    """Kill or freeze ranks of `paceline run`; the others continue, and lost ranks are replaced."""
    argv = _trial(bench, "alone", "--pause=0")
    reference = Case("alone", argv, clears=[bench.work / "alone"])  # reference for the others
    # runs without other cases, because its times are compared
    killed = _launched(bench, "killed", "--lose=1:forward:20")
    bench.run_all("recovery", [reference])
    results = {result["case"]: result for result in bench.run_all("recovery", [killed])}
    is_replaced = results["killed"].get("to rounding")
    cases = [
        _launched(bench, "frozen", "--lose=2:forward:20", "--how=stop"),
        _launched(bench, "undisturbed"),
    ]
    if is_replaced:  # otherwise time is short for the other cases
        cases += [
            _launched(bench, "first_killed", "--lose=0:during:20"),
            _launched(bench, "killed_twice", "--lose=1:stepped:15", "--lose=2:during:40"),
            _launched(bench, "killed_int8", "--lose=1:during:20", "--communication=int8"),
            _launched(bench, "sharded_killed", "--lose=1:forward:20", "--shard"),  # ends the job
            _connecting_killed(bench),  # ends the job, unless NCCL reports an error to the others
        ]
    bench.run_all("recovery", cases, parallel=2)


def _connecting_killed(bench: Bench) -> Case:
    """The replacement of a lost rank is lost while all ranks create a communicator."""
    loss_options = ("--lose=1:forward:20", "--lose=1:connecting:0")
    case = _launched(bench, "connecting_killed", *loss_options)
    case.env = {**case.env, **({"STANDIN_CONNECT": "spin"} if bench.dry else {})}
    case.judge = lambda: (
        judge_run(bench, case.name, is_compared=False)
        | {"last lines": _launcher_lines(bench, case.name)}
    )
    return case


def straggler(bench: Bench) -> None:
    """One rank is slower in each step."""
    case = _launched(bench, "straggler", "--slow=1:0.05", "--pause=0", "--epochs=8")

    def judge() -> Result:
        result = judge_run(bench, case.name, is_compared=False)
        straggler_events = [
            event for event in _events(bench, case.name) if event["event"] == "straggler"
        ]
        return result | {
            "named": [[event["straggler"], event["cause"]] for event in straggler_events]
        }

    case.judge = judge
    bench.run_all("straggler", [case])


def cost(bench: Bench) -> None:
    """Seconds of a step with and without recovery when no rank is lost."""
    options = ("--pause=0", "--epochs=40")
    with_recovery = _launched(bench, "with_recovery", *options)
    without_recovery = _launched(bench, "without_recovery", *options, handling="3")
    for case in (with_recovery, without_recovery):
        case.judge = lambda name=case.name: judge_run(bench, name, is_compared=False)
    bench.run_all("cost", [with_recovery, without_recovery], parallel=1)


def judge_run(bench: Bench, name: str, *, is_compared: bool = True) -> Result:
    """Result of a launched training that lost ranks."""
    folder, run = bench.work / name, bench.work / f"{name}.run"
    result: Result = {}
    lost = {file.name: float(file.read_text()) for file in sorted(folder.glob("lost.*"))}
    records = _steps(folder)
    finished = {record[1] for record in records if record[2]}
    result["steps"] = len(finished)
    times = sorted(record[0] for record in records if record[3] == 0)
    gaps = sorted(end - start for start, end in itertools.pairwise(times))
    result["median step s"] = round(gaps[len(gaps) // 2], 4) if gaps else None
    pauses, completions = [], []
    for lost_at in lost.values():
        after = [record for record in records if record[0] > lost_at and record[2]]
        smaller = [record[0] for record in after if record[4] == 2]
        if smaller:
            pauses.append(round(min(smaller) - lost_at, 2))
            complete = [
                record[0] for record in after if record[4] == 3 and record[0] > min(smaller)
            ]
            if complete:
                completions.append(round(min(complete) - lost_at, 2))
    result |= {"trains again after s": pauses, "complete again after s": completions}
    text = json.dumps(_events(bench, name))
    result["recoverable"] = '"able": true' in text
    result["frozen rank named"] = "rank frozen" in text
    for file in run.glob("result.json"):
        recoveries = json.loads(file.read_text()).get("recoveries") or {}
        result["recoveries"] = recoveries.get("of", [])
    ends = [bench.work / folder_name / "end.pt" for folder_name in ("alone", name)]
    if not is_compared:
        return result
    if all(end.exists() for end in ends):
        import torch

        max_difference = difference(*(torch.load(end, map_location="cpu") for end in ends))
        result |= {
            "difference from one rank": max_difference,
            "to rounding": max_difference < EXACT,
        }
    else:
        result["last lines"] = _launcher_lines(bench, name)
    return result


def _launcher_lines(bench: Bench, name: str) -> list[str]:
    return [line for line in bench.text(name).splitlines() if line.startswith("paceline:")][-4:]


def _events(bench: Bench, name: str) -> list[Result]:
    return [
        json.loads(line)
        for file in (bench.work / f"{name}.run").rglob("events.jsonl")
        for line in file.read_text().splitlines()
        if line.startswith("{")
    ]


def _steps(folder: Path) -> list[list[Any]]:
    files = folder.glob("steps.*")
    return sorted(json.loads(line) for f in files for line in f.read_text().splitlines())


def tests(bench: Bench) -> None:
    """Run the tests that need a GPU and NCCL."""
    argv = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-n0", "-k", "nccl", "-s"]
    root_flag = f"--rootdir={ROOT}"
    argv += [root_flag, "-c", str(ROOT / "pyproject.toml"), str(ROOT / "tests/train/test_gpu.py")]

    def judge() -> Result:
        lines = bench.text("tests").splitlines()
        return {"last lines": [line for line in lines if line.strip()][-6:]}

    bench.run_all("tests", [Case("tests", argv, limit_s=110, judge=judge)])


def _recipe(bench: Bench, name: str, ranks: int, recipe: str, *options: str, like: str = "",
            env: Mapping[str, str] | None = None, limit_s: float = 80.0) -> Case:  # fmt: skip
    run = bench.work / name
    common = ["--steps=60", "--seed=3", "--deterministic", "--checkpoint-every=never"]
    argv = ["-m", f"paceline.recipes.{recipe}", *common, f"--device={bench.device}"]
    argv += ["--global-batch=64", *options, f"--run-dir={run}"]

    def judge() -> Result:
        lines = [line for line in bench.text(name).splitlines() if "step 60/60" in line]
        result: Result = {"last": lines[-1] if lines else "", "like": like}
        if like:
            result["difference"] = _model_difference(bench, name, like)
        return result

    return Case(name, argv, ranks, env or {}, limit_s, judge, clears=[run])


def _model_difference(bench: Bench, name: str, like: str) -> float:
    from safetensors.torch import load_file

    files = [bench.work / folder / "model/model.safetensors" for folder in (name, like)]
    return difference(*map(load_file, files))


def ranks(bench: Bench) -> None:
    """Recipes with one, two and four ranks; ``tf32`` and ``no_tf32`` show the effect of TF32."""
    float64 = "--dtype=float64"
    tf32_off = {"NVIDIA_TF32_OVERRIDE": "0"}
    single = [
        _recipe(bench, "one", 1, "image", float64),
        _recipe(bench, "one_tf32", 1, "image"),
        _recipe(bench, "one_no_tf32", 1, "image", env=tf32_off),
        _recipe(bench, "text_one", 1, "text", float64),
    ]
    several = [
        _recipe(bench, "two", 2, "image", float64, like="one"),
        _recipe(bench, "four", 4, "image", float64, like="one"),
        _recipe(bench, "two_tf32", 2, "image", like="one_tf32"),
        _recipe(bench, "two_no_tf32", 2, "image", like="one_no_tf32", env=tf32_off),
        _recipe(bench, "shard", 2, "image", float64, "--shard", like="one"),
        _recipe(bench, "shard_four", 4, "image", float64, "--shard", like="one"),
        _recipe(bench, "text_two", 2, "text", float64, like="text_one"),
    ]
    bench.run_all("ranks", [_all_reduce(bench, number) for number in (2, 4)])
    bench.run_all("ranks", single)
    bench.run_all("ranks", several)
    bench.run_all("ranks", [_sft_files(bench)])
    bench.run_all("ranks", [_sft(bench, "sft_one", 1), _sft(bench, "sft_two", 2, like="sft_one")])


def _all_reduce(bench: Bench, ranks: int) -> Case:
    """All-reduces with torch alone."""
    name, dry = f"all_reduce_{ranks}", ["--dry"] if bench.dry else []
    argv = [str(HERE / "all_reduce.py"), "{rank}", str(ranks), "{port}", *dry]

    def judge() -> Result:
        lines = [line for line in bench.text(name).splitlines() if " elements: " in line]
        return {"last": "; ".join(lines)}

    return Case(name, argv, ranks, judge=judge)


def _sft_files(bench: Bench) -> Case:
    """Create the tests' tiny language model and chats; needs Transformers."""
    folder = bench.work / "sft_files"
    code = (
        f"import pathlib, sys; sys.path.insert(0, {str(ROOT / 'tests/unit')!r});"
        " import tiny_language_model as tiny; folder = pathlib.Path(sys.argv[1]);"
        " tiny.save(folder / 'base', kind='GPTNeoX');"
        " tiny.write_jsonl(folder / 'chat.jsonl', tiny.chats(24))"
    )
    return Case("sft_files", ["-c", code, str(folder)], clears=[folder])


def _sft(bench: Bench, name: str, ranks: int, like: str = "") -> Case:
    run, files = bench.work / name, bench.work / "sft_files"
    argv = [
        *("-m", "paceline.recipes.language.sft", f"--model={files / 'base'}"),
        *(f"--data={files / 'chat.jsonl'}", f"--device={bench.device}", "--dtype=float64"),
        *("--epochs=2", "--global-batch=8", "--log-every=1", "--lr=0.01", "--max-length=200"),
        *("--samples=1", "--sample-tokens=3", "--lora-rank=4", "--seed=3", f"--run-dir={run}"),
    ]

    def judge() -> Result:
        lines = [line for line in bench.text(name).splitlines() if "step 6/6" in line]
        result: Result = {"last": lines[-1] if lines else "", "like": like}
        return result | ({"difference": _model_difference(bench, name, like)} if like else {})

    return Case(name, argv, ranks, judge=judge, clears=[run])


def communication(bench: Bench) -> None:
    """Each communication method, compared with the case ``one`` of the part ``ranks``."""
    methods = ("fp16", "bf16", "int8", "int4", "local", "auto")
    cases = [
        _recipe(
            bench, method, 2, "image", "--dtype=float64", f"--communication={method}", like="one"
        )
        for method in methods
    ]
    bench.run_all("communication", cases)


def resume(bench: Bench) -> None:
    """Kill a training on the GPU and resume it on a CPU."""
    name = "resumed"
    run = bench.work / name
    options = ("--dtype=float64", "--checkpoint-every=10")
    uninterrupted = _recipe(bench, "whole", 1, "image", *options)
    first = _recipe(bench, "on_gpu", 1, "image", *options)

    def kill(processes: list[subprocess.Popen[bytes]]) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and processes[0].poll() is None:
            if (run / "checkpoints/20/manifest.json").exists():
                processes[0].kill()
            time.sleep(0.002)

    argv = [word for word in first.argv if not word.startswith("--run-dir")]
    killed = Case("on_gpu", [*argv, f"--run-dir={run}"], 1, act=kill, clears=[run])
    argv = [word for word in argv if not word.startswith("--device")]

    def judge() -> Result:
        resumed_lines = [line for line in bench.text("on_cpu").splitlines() if "resumed" in line]
        return {"resumed": resumed_lines, "difference": _model_difference(bench, name, "whole")}

    resumed_case = Case("on_cpu", [*argv, "--device=cpu", f"--run-dir={run}"], 1, judge=judge)
    bench.run_all("resume", [uninterrupted, killed])
    bench.run_all("resume", [resumed_case])


def errors(bench: Bench) -> None:
    """NCCL groups that fail, and the output of `paceline explain` for their logs."""
    script, dry = str(HERE / "nccl_errors.py"), ["--dry"] if bench.dry else []

    def failing(name: str, ranks: int, **env: str) -> Case:
        argv = [script, name, "{rank}", str(ranks), "{port}", *dry]
        variables = {"NCCL_DEBUG": "INFO", "TORCH_FR_BUFFER_SIZE": "200", **env}
        return Case(
            f"error_{name}", argv, ranks, variables, 45, lambda: explained(bench, name, ranks)
        )

    cases = [
        failing("killed", 3),
        failing("mismatch", 2),
        failing("interface", 2, NCCL_SOCKET_IFNAME="nosuch0"),
        failing("same_host", 2, NCCL_HOSTID="same"),
    ]
    bench.run_all("errors", cases)


def explained(bench: Bench, name: str, ranks: int) -> Result:
    log = bench.out / "logs" / f"error_{name}.log"
    log.write_text("".join(bench.text(f"error_{name}", rank) for rank in range(ranks)))
    argv = [sys.executable, "-m", "paceline", "explain", "--log", str(log)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    completed = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, env=env, check=False
    )
    return {"explain": completed.returncode, "says": (completed.stdout + completed.stderr).strip()}


PARTS = {
    "environment": environment,
    "recovery": recovery,
    "ranks": ranks,
    "resume": resume,
    "cost": cost,
    "tests": tests,
    "communication": communication,
    "errors": errors,
    "straggler": straggler,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=lambda text: Path(text).resolve())
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seconds", type=float, default=480.0)
    options = parser.parse_intermixed_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"{', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    bench = Bench(options)
    for part in options.parts or PARTS:
        start = time.monotonic()
        try:
            PARTS[part](bench)
        except Exception as error:  # continue with the other parts
            print(f"{part}: {type(error).__name__}: {error}", flush=True)
        print(f"-- {part}: {time.monotonic() - start:.0f} s", flush=True)
    bench.write_page()
    print((bench.out / "result.md").read_text())


if __name__ == "__main__":
    main()
