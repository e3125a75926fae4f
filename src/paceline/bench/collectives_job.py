"""The job of ``paceline bench collectives``: checks and times every collective at every size.

It runs on every rank; rank 0 writes ``collectives.json`` into the run's folder. Its argument is a
:class:`Spec` as JSON.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.bench.bandwidth import IN_PLACE, TYPES, Row, elements, make_row
from paceline.bench.link_rates_job import device_name, gather, measure, synchronize
from paceline.program import guarded
from paceline.spec import jobenv
from paceline.spec.errors import SettingError

RESULT = "collectives.json"
MAX_DURATION_S = 20.0  # for one size; slow links get fewer calls
INJECT = "PACELINE_BENCH_INJECT"  # for tests: corrupts one value

_TORCH = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, slots=True)
class Spec:
    """What to measure.

    Attributes:
        collectives, sizes: In order; sizes in bytes.
        type, redop, root: As in nccl-tests.
        iterations, warmup: Number of timed calls, and of calls before them.
        average: Which time counts: rank 0's (0), the mean (1), the minimum (2) or maximum (3).
        blocking: Whether to wait for each call before the next.
        ways: Whether to measure the hosts and the links between them, too.
        backend: ``auto`` or a name.
    """

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    type: str = "float"
    redop: str = "sum"
    root: int = 0
    iterations: int = 20
    warmup: int = 5
    check: bool = True
    average: int = 3
    blocking: bool = False
    ways: bool = True
    backend: str = "auto"


def choose_backend(name: str) -> tuple[str, torch.device]:
    """The backend and this rank's device."""
    local = int(os.environ.get(jobenv.LOCAL_RANK, "0"))
    xpu = getattr(torch, "xpu", None)
    if name == "nccl" or (name == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", local)
        if local >= torch.cuda.device_count():
            raise SettingError(
                f"--backend nccl: local rank {local} needs its own GPU",
                found=f"{torch.cuda.device_count()} on this machine that torch sees",
                remedy="-p gpu, or --backend gloo, which measures in the machine's memory",
            )
        torch.cuda.set_device(device)
        return "nccl", device
    if name == "xccl" or (name == "auto" and xpu is not None and xpu.is_available()):
        return "xccl", torch.device("xpu", local)
    return ("gloo" if name == "auto" else name), torch.device("cpu")


class Bench:
    """The benchmark on one rank."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def run(self) -> list[Row]:
        """Measures every row; all ranks get the same rows."""
        return [
            self._measure(collective, size)
            for collective in self._spec.collectives
            for size in self._spec.sizes
        ]

    def _measure(self, collective: str, size: int) -> Row:
        spec = self._spec
        count = elements(collective, size, TYPES[spec.type], self.ranks)
        call = (collective, count, spec.type, spec.redop, spec.root, self.ranks)
        try:
            results = self._check_and_time(collective, count, in_place=False)
            in_place = None
            if collective in IN_PLACE:
                in_place = self._check_and_time(collective, count, in_place=True)
            return make_row(*call, *results, in_place)
        except RuntimeError as error:
            if "not support" not in str(error) and "not implemented" not in str(error).lower():
                raise
            unmeasured = (0.0, 0.0, 0.0, -1, None, "not supported by this backend")
            size = count * TYPES[spec.type]
            return Row(collective, size, count, spec.type, "none", -1, *unmeasured)

    def _check_and_time(self, collective: str, count: int, in_place: bool) -> tuple[float, int]:
        """Seconds of one call, and wrong elements; -1 if not checked."""
        wrong = self._check(collective, count, in_place) if self._spec.check else -1
        return self._time(collective, count, in_place), wrong

    # --- one call ----------------------------------------------------------------------------

    def _values(self, rank: int, count: int) -> torch.Tensor:
        """The input of a rank: small integers, whose sums are exact in every type."""
        return ((torch.arange(count, device=self._device) + rank) % 3).to(_TORCH[self._spec.type])

    def _call(
        self, collective: str, count: int, in_place: bool
    ) -> tuple[Callable[[], object], torch.Tensor]:
        """The call, and the buffer of its result.

        torch reduces and broadcasts in place only, so an out-of-place call includes a copy.
        """
        spec, part = self._spec, count // self.ranks
        op = _OPS[spec.redop]
        inputs = self._values(self.rank, count)
        result = inputs if in_place else torch.empty_like(inputs)
        rank_slice = slice(self.rank * part, (self.rank + 1) * part)

        def on_result(collective: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
            def call() -> None:
                if not in_place:
                    result.copy_(inputs)
                collective(result)

            return call

        if collective == "all_reduce":
            return on_result(lambda buffer: dist.all_reduce(buffer, op)), result
        if collective == "broadcast":
            return on_result(lambda buffer: dist.broadcast(buffer, spec.root)), result
        if collective == "reduce":
            return on_result(lambda buffer: dist.reduce(buffer, spec.root, op)), result
        if collective == "sendrecv":
            return self._ring(inputs)
        if collective == "all_gather":
            shard = result[rank_slice] if in_place else self._values(self.rank, part)
            shard.copy_(self._values(self.rank, part))
            return lambda: dist.all_gather_into_tensor(result, shard), result
        if collective == "reduce_scatter":
            shard = inputs[rank_slice] if in_place else result[:part]
            return lambda: dist.reduce_scatter_tensor(shard, inputs, op), shard
        return lambda: dist.all_to_all_single(result, inputs), result

    def _ring(self, sent: torch.Tensor) -> tuple[Callable[[], object], torch.Tensor]:
        """Each rank sends to the next and receives from the previous one."""
        received = torch.empty_like(sent)
        target, source = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        if self.ranks == 1 and self._device.type == "cpu":  # gloo cannot send to the same rank
            return lambda: received.copy_(sent), received

        def call() -> None:
            # a batch, because NCCL would block in the first of two separate calls
            operations = [dist.P2POp(dist.isend, sent, target),
                          dist.P2POp(dist.irecv, received, source)]  # fmt: skip
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return call, received

    def _expected(self, collective: str, count: int) -> torch.Tensor | None:
        """The expected result; ``None`` if this rank gets none."""
        part = count // self.ranks
        if collective in ("all_reduce", "reduce"):
            has_result = collective == "all_reduce" or self.rank == self._spec.root
            return self._reduced(count) if has_result else None
        if collective == "broadcast":
            return self._values(self._spec.root, count)
        if collective == "sendrecv":
            return self._values((self.rank - 1) % self.ranks, count)
        if collective == "all_gather":
            return torch.cat([self._values(rank, part) for rank in range(self.ranks)])
        rank_slice = slice(self.rank * part, (self.rank + 1) * part)
        if collective == "reduce_scatter":
            return self._reduced(count)[rank_slice]
        return torch.cat([self._values(rank, count)[rank_slice] for rank in range(self.ranks)])

    def _reduced(self, count: int) -> torch.Tensor:
        stack = torch.stack([self._values(rank, count) for rank in range(self.ranks)])
        if self._spec.redop == "sum":
            return stack.sum(0, dtype=stack.dtype)
        return stack.amax(0) if self._spec.redop == "max" else stack.amin(0)

    # --- many calls --------------------------------------------------------------------------

    def _check(self, collective: str, count: int, in_place: bool) -> int:
        """Wrong elements over all ranks after one call."""
        call, buffer = self._call(collective, count, in_place)
        call()
        expected = self._expected(collective, count)
        is_last = self.rank == self.ranks - 1
        if os.environ.get(INJECT) and not in_place and is_last and expected is not None:
            buffer[0] += 1
        wrong = 0 if expected is None else int((buffer != expected).sum())
        return int(self._total(float(wrong), dist.ReduceOp.SUM))

    def _time(self, collective: str, count: int, in_place: bool) -> float:
        """Seconds of one call."""
        call, _ = self._call(collective, count, in_place)
        max_calls = max(1, int(MAX_DURATION_S / 2 / max(self._time_calls(call, 1), 1e-9)))
        if warmup := min(self._spec.warmup, max_calls):
            self._time_calls(call, warmup)
        return self._time_calls(call, min(self._spec.iterations, max_calls))

    def _time_calls(self, call: Callable[[], object], count: int) -> float:
        self._total(0.0, dist.ReduceOp.SUM)  # a barrier
        start = time.perf_counter()
        for _ in range(count):
            call()
            if self._spec.blocking:
                synchronize(self._device)
        synchronize(self._device)
        return self._average((time.perf_counter() - start) / count)

    def _average(self, seconds: float) -> float:
        """Combines all ranks' times as requested."""
        if self._spec.average == 0:
            return self._total(seconds if self.rank == 0 else 0.0, dist.ReduceOp.SUM)
        if self._spec.average == 1:
            return self._total(seconds / self.ranks, dist.ReduceOp.SUM)
        return self._total(seconds, dist.ReduceOp.MIN if self._spec.average == 2
                           else dist.ReduceOp.MAX)  # fmt: skip

    def _total(self, value: float, op: Any) -> float:
        tensor = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op)
        return float(tensor.item())


def device_entry(device: torch.device) -> dict[str, Any]:
    """This rank's entry in the list of devices."""
    host = os.environ.get(jobenv.HOST, "")[:200]
    return {"pid": os.getpid(), "host": host, "device": device.index or 0,
            "name": device_name(device)[:80]}  # fmt: skip


def write_result(run: Path, result: Mapping[str, Any]) -> None:
    """Writes the result atomically, in place of whatever file, link or pipe has its name."""
    temporary = run / f".{RESULT}.{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=1) + "\n")
        temporary.replace(run / RESULT)
    finally:
        temporary.unlink(missing_ok=True)


def main(argv: list[str]) -> int:
    """Measures and writes the result."""
    options = json.loads(argv[0])
    sequences = {name: tuple(options[name]) for name in ("collectives", "sizes")}
    spec = Spec(**{**options, **sequences})
    backend, device = choose_backend(spec.backend)
    torch.set_num_threads(1)  # spinning threads would take CPU time from the sockets
    dist.init_process_group(backend)
    try:
        bench = Bench(spec, device)
        devices = gather(device_entry(device), device)
        rows = bench.run()
        links = measure(device).to_json() if spec.ways else None
        if bench.rank == 0:
            result = {
                "backend": backend,
                "ranks": bench.ranks,
                "nodes": int(os.environ.get(jobenv.GROUP_WORLD_SIZE, "1")),
                "torch": str(torch.__version__),
                "devices": devices,
                "ways": links,
                "rows": [asdict(row) for row in rows],
            }
            write_result(Path(os.environ[jobenv.RUN_DIR]), result)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
