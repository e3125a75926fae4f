"""The job of ``paceline bench collectives``: every collective, every size, checked and timed.

Runs on every rank; rank 0 writes ``collectives.json`` into the run's folder. The one argument is
JSON: see :class:`Spec`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.bench.bandwidth import IN_PLACE, TYPES, Row, elements, row
from paceline.bench.ways_job import device_name, gather, measure
from paceline.program import guarded
from paceline.spec import jobenv
from paceline.spec.errors import SettingError

RESULT = "collectives.json"
LONGEST_S = 20.0  # of one size: a slow link gets fewer calls
INJECT = "PACELINE_BENCH_INJECT"  # for tests of the checking: spoil one value

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
        collectives, sizes: Which, in order; sizes in bytes.
        type, redop, root: As in nccl-tests.
        iterations, warmup: Calls that are timed, and before.
        check: Whether results are checked.
        average: Whose time counts: rank 0's (0), the mean (1), the least (2) or the most (3).
        blocking: Wait for each call before the next.
        ways: Measure the hosts and the ways between them, too.
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


def choose_backend(wanted: str) -> tuple[str, torch.device]:
    """The backend and this rank's device."""
    local = int(os.environ.get(jobenv.LOCAL_RANK, "0"))
    xpu = getattr(torch, "xpu", None)
    if wanted == "nccl" or (wanted == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", local)
        if local >= torch.cuda.device_count():
            raise SettingError(
                f"--backend nccl: local rank {local} needs a GPU of its own",
                found=f"{torch.cuda.device_count()} on this machine that torch sees",
                remedy="-p gpu, or --backend gloo, which measures in the machine's memory",
            )
        torch.cuda.set_device(device)
        return "nccl", device
    if wanted == "xccl" or (wanted == "auto" and xpu is not None and xpu.is_available()):
        return "xccl", torch.device("xpu", local)
    return ("gloo" if wanted == "auto" else wanted), torch.device("cpu")


class Bench:
    """One rank's part.

    Args:
        spec: What to measure.
        device: Where the buffers are.
    """

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def run(self) -> list[Row]:
        """Every line, the same on all ranks."""
        return [
            self._measure(collective, size)
            for collective in self._spec.collectives
            for size in self._spec.sizes
        ]

    def _measure(self, collective: str, size: int) -> Row:
        spec = self._spec
        count = elements(collective, size, TYPES[spec.type], self.ranks)
        about = (collective, count, spec.type, spec.redop, spec.root, self.ranks)
        try:
            aside, seconds = self._both(collective, count, in_place=False)
            inner = self._both(collective, count, in_place=True) if collective in IN_PLACE else None
            return row(*about, seconds, aside, inner and (inner[1], inner[0]))
        except RuntimeError as error:
            if "not support" not in str(error) and "not implemented" not in str(error).lower():
                raise
            nothing = (0.0, 0.0, 0.0, -1, None, "not supported by this backend")
            size = count * TYPES[spec.type]
            return Row(collective, size, count, spec.type, "none", -1, *nothing)

    def _both(self, collective: str, count: int, in_place: bool) -> tuple[int, float]:
        """Wrong elements, -1 unchecked, and seconds of one call."""
        wrong = self._check(collective, count, in_place) if self._spec.check else -1
        return wrong, self._time(collective, count, in_place)

    # --- one call ----------------------------------------------------------------------------

    def _values(self, rank: int, count: int) -> torch.Tensor:
        """What a rank contributes: small whole numbers, whose sums every type holds exactly."""
        return ((torch.arange(count, device=self._device) + rank) % 3).to(_TORCH[self._spec.type])

    def _call(
        self, collective: str, count: int, in_place: bool
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """The call, and the buffer in which its result stands.

        torch reduces and broadcasts in place only: the result in another buffer costs a copy.
        """
        spec, part = self._spec, count // self.ranks
        op = _OPS[spec.redop]
        mine = self._values(self.rank, count)
        result = mine if in_place else torch.empty_like(mine)
        own = slice(self.rank * part, (self.rank + 1) * part)

        def whole(do: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
            def call() -> None:
                if not in_place:
                    result.copy_(mine)
                do(result)

            return call

        if collective == "all_reduce":
            return whole(lambda buffer: dist.all_reduce(buffer, op)), result
        if collective == "broadcast":
            return whole(lambda buffer: dist.broadcast(buffer, spec.root)), result
        if collective == "reduce":
            return whole(lambda buffer: dist.reduce(buffer, spec.root, op)), result
        if collective == "sendrecv":
            return self._ring(mine)
        if collective == "all_gather":
            small = result[own] if in_place else self._values(self.rank, part)
            small.copy_(self._values(self.rank, part))
            return lambda: _done(dist.all_gather_into_tensor(result, small)), result
        if collective == "reduce_scatter":
            small = mine[own] if in_place else result[:part]
            return lambda: _done(dist.reduce_scatter_tensor(small, mine, op)), small
        return lambda: _done(dist.all_to_all_single(result, mine)), result

    def _ring(self, mine: torch.Tensor) -> tuple[Callable[[], None], torch.Tensor]:
        """Everybody sends to the next and receives from the one before."""
        received = torch.empty_like(mine)
        to, of = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        if self.ranks == 1 and self._device.type == "cpu":  # gloo sends nothing to itself
            return lambda: _done(received.copy_(mine)), received

        def call() -> None:
            # NCCL runs what is sent and received in a group at once; one by one, a rank's own
            # sending would wait for the receiving that stands behind it
            both = [dist.P2POp(dist.isend, mine, to), dist.P2POp(dist.irecv, received, of)]
            for one in dist.batch_isend_irecv(both):
                one.wait()

        return call, received

    def _expected(self, collective: str, count: int) -> torch.Tensor | None:
        """What the buffer must hold; ``None`` where this rank gets no result."""
        part = count // self.ranks
        if collective in ("all_reduce", "reduce"):
            ours = collective == "all_reduce" or self.rank == self._spec.root
            return self._reduced(count) if ours else None
        if collective == "broadcast":
            return self._values(self._spec.root, count)
        if collective == "sendrecv":
            return self._values((self.rank - 1) % self.ranks, count)
        if collective == "all_gather":
            return torch.cat([self._values(rank, part) for rank in range(self.ranks)])
        mine = slice(self.rank * part, (self.rank + 1) * part)
        if collective == "reduce_scatter":
            return self._reduced(count)[mine]
        return torch.cat([self._values(rank, count)[mine] for rank in range(self.ranks)])

    def _reduced(self, count: int) -> torch.Tensor:
        every = [self._values(rank, count) for rank in range(self.ranks)]
        if self._spec.redop == "sum":
            return sum(every[1:], every[0])
        stack = torch.stack(every)
        return stack.amax(0) if self._spec.redop == "max" else stack.amin(0)

    # --- many calls --------------------------------------------------------------------------

    def _check(self, collective: str, count: int, in_place: bool) -> int:
        """Wrong elements over all ranks after one call."""
        call, buffer = self._call(collective, count, in_place)
        call()
        expected = self._expected(collective, count)
        if (
            os.environ.get(INJECT)
            and not in_place
            and self.rank == self.ranks - 1
            and expected is not None
        ):
            buffer[0] += 1
        wrong = 0 if expected is None else int((buffer != expected).sum())
        return int(self._total(float(wrong), dist.ReduceOp.SUM))

    def _time(self, collective: str, count: int, in_place: bool) -> float:
        """Seconds of one call."""
        call, _ = self._call(collective, count, in_place)
        once = self._timed(call, 1)
        room = max(1, int(LONGEST_S / 2 / max(once, 1e-9)))
        warmup = min(self._spec.warmup, room)
        if warmup:
            self._timed(call, warmup)
        return self._timed(call, min(self._spec.iterations, room))

    def _timed(self, call: Callable[[], None], times: int) -> float:
        self._total(0.0, dist.ReduceOp.SUM)  # all start together
        began = time.perf_counter()
        for _ in range(times):
            call()
            if self._spec.blocking:
                self._synchronise()
        self._synchronise()
        return self._of_all((time.perf_counter() - began) / times)

    def _of_all(self, seconds: float) -> float:
        """One figure of all ranks' times."""
        if self._spec.average == 0:
            return self._total(seconds if self.rank == 0 else 0.0, dist.ReduceOp.SUM)
        if self._spec.average == 1:
            return self._total(seconds / self.ranks, dist.ReduceOp.SUM)
        least = self._spec.average == 2
        return self._total(seconds, dist.ReduceOp.MIN if least else dist.ReduceOp.MAX)

    def _synchronise(self) -> None:
        if self._device.type != "cpu":
            getattr(torch, self._device.type).synchronize()

    def _total(self, value: float, op: Any) -> float:
        double = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.all_reduce(double, op)
        return float(double.item())


def _done(pending: Any) -> None:
    """A synchronous call returns nothing to wait for."""


def using(device: torch.device) -> dict[str, Any]:
    """This rank in the list of devices."""
    host = os.environ.get(jobenv.HOST, "")[:200]
    return {"pid": os.getpid(), "host": host, "device": device.index or 0,
            "name": device_name(device)[:80]}  # fmt: skip


def main(argv: list[str]) -> int:
    """Measures and writes the result."""
    given = json.loads(argv[0])
    spec = Spec(
        **{**given, "collectives": tuple(given["collectives"]), "sizes": tuple(given["sizes"])}
    )
    backend, device = choose_backend(spec.backend)
    torch.set_num_threads(1)  # threads that wait for work by spinning would take the sockets' time
    dist.init_process_group(backend)
    try:
        bench = Bench(spec, device)
        devices = gather(using(device), device)
        rows = bench.run()
        ways = measure(device).to_json() if spec.ways else None
        if bench.rank == 0:
            found = {
                "backend": backend,
                "ranks": bench.ranks,
                "nodes": int(os.environ.get(jobenv.GROUP_WORLD_SIZE, "1")),
                "torch": str(torch.__version__),
                "devices": devices,
                "ways": ways,
                "rows": [one.to_json() for one in rows],
            }
            target = Path(os.environ[jobenv.RUN_DIR]) / RESULT
            target.write_text(json.dumps(found, indent=1) + "\n")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
