"""Latency and throughput of a trained model: ``paceline benchmark RUN``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch

from paceline.recipes.argv import check_at_least, run_command
from paceline.recipes.use import BenchmarkOptions
from paceline.recipes.use.evaluate import module_of
from paceline.recipes.use.export import PortableModel
from paceline.recipes.use.onnx_file import OnnxNetwork
from paceline.spec.errors import SettingError
from paceline.train.device import available_devices, choose_device, precision


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """Timing of one batch size."""

    batch: int
    median_ms: float
    p90_ms: float
    samples_per_s: float


def benchmark(options: BenchmarkOptions) -> None:
    """Measures and prints."""
    if not options.batch:
        raise SettingError("--batch names no size", remedy="--batch 1 8")
    for flag, value in (("--iterations", options.iterations), ("--batch", min(options.batch))):
        check_at_least(flag, value, 1)
    check_at_least("--warm-up", options.warm_up, 0)
    if options.threads:
        torch.set_num_threads(options.threads)
    model: PortableModel = module_of(options.run).portable(options.run)
    if options.onnx:
        model = with_onnx_file(model, options)
    device = choose_device("cpu" if options.onnx else options.device, available_devices(), 0)
    dtype = options.dtype or ("float32" if options.onnx else model.config["number_format"])
    timings = [measure_batch(model, options, device, dtype, size) for size in options.batch]
    numbers = {"onnx": options.onnx} if options.onnx else {"dtype": dtype}
    environment = {"device": str(device), **numbers, "threads": torch.get_num_threads()}
    if options.json:
        print(json.dumps({**environment, "results": [asdict(timing) for timing in timings]}))
        return
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print(f"{'batch':>6} {'median ms':>10} {'p90 ms':>10} {'samples/s':>11}")
    for timing in timings:
        figures = f"{timing.median_ms:>10.2f} {timing.p90_ms:>10.2f} {timing.samples_per_s:>11.1f}"
        print(f"{timing.batch:>6} {figures}")


def with_onnx_file(model: PortableModel, options: BenchmarkOptions) -> PortableModel:
    """Returns the model with the network of an ONNX file."""
    for flag, value in (("--dtype", options.dtype), ("--device", options.device)):
        if value not in ("", "auto", "cpu"):
            raise SettingError(
                f"{flag} {value} cannot be combined with --onnx",
                found="the file has its own precision, and is run on the CPU",
                remedy="leave out one of the two",
            )
    return replace(model, network=OnnxNetwork(Path(options.onnx), model.names, model.config))


@torch.inference_mode()
def measure_batch(
    model: PortableModel, options: BenchmarkOptions, device: torch.device, dtype: str, size: int
) -> BatchTiming:
    """Times calls with ``size`` samples."""
    numbers = precision(dtype)
    model.network.to(device=device, dtype=numbers.parameters)
    rows = [torch.arange(size) % len(example) for example in model.examples]
    inputs = tuple(e[row].to(device) for e, row in zip(model.examples, rows, strict=True))
    inputs = tuple(
        example.to(numbers.parameters) if example.is_floating_point() else example
        for example in inputs
    )

    def call() -> None:
        model.measure(model.network, inputs)

    with numbers.autocast(device):
        times = time_calls(call, options.warm_up, options.iterations, device)
    middle = median(times)
    p90 = quantiles(times, n=10)[-1] if len(times) > 1 else times[0]
    return BatchTiming(size, middle * 1e3, p90 * 1e3, size / middle)


def time_calls(
    call: Callable[[], object], warm_up: int, iterations: int, device: torch.device
) -> list[float]:
    """Returns the seconds of each call after ``warm_up`` calls."""
    times = []
    for number in range(warm_up + iterations):
        start = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        if number >= warm_up:
            times.append(time.perf_counter() - start)
    return times


main = partial(run_command, benchmark, BenchmarkOptions, "paceline benchmark")


if __name__ == "__main__":
    sys.exit(main())
