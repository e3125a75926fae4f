"""Finds out whether a training process exchanges gradients with others.

Reads torch's flight recorder after the first optimizer steps and at the end; without an answer the
process counts as one that exchanges. The text of this module also runs in spawned processes, so it
imports nothing of this package.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import json
import math
import os
import resource
import signal
import sys
import time
from typing import Any, Callable, Dict, List, Optional

EVENT = "gradient exchange"
MIN_GRADIENT_ELEMENTS = 32  # of a collective: metrics have fewer, gradients of models have more
OBJECT_DTYPES = ("Byte", "Long")  # pickled objects, sizes and counts
LARGE_OBJECT_BYTES = 1024  # one as large as the largest parameter may hold models or codes of them
# exchange gradients without c10d's groups; our sessions compare the ranks' weights themselves
OTHER_LIBRARIES = ("mpi4py.MPI", "horovod", "torchft", "paceline.train.session")
STACK_SIGNAL = signal.SIGRTMAX - 3  # that of stack_dump, which this module cannot import
FINALIZER_PRIORITY = -100  # priority: after those of the script

try:
    SOURCE: Optional[str] = globals()["__loader__"].get_source(__name__)
except (KeyError, AttributeError, OSError):  # in a spawned process, which got it as text
    SOURCE = None


class GradientWatch:
    """Watches this process, and those that it forks or spawns with ``multiprocessing``.

    Args:
        rank_pid, events: The rank's process, and its descriptor for events, which a process below
            it opens by way of ``/proc``.
        source: Text of this module.
    """

    def __init__(self, rank_pid: int, events: int, source: Optional[str]) -> None:
        self._rank_pid = rank_pid
        self._events = events
        self._source = source
        self._started_cpu_s = time.process_time()
        self._start()

    def _start(self) -> None:
        self._started_ns = time.time_ns()
        self._steps = 0
        self._largest_parameter = 0
        self._calls = 0
        self._largest_call = 0
        self._group_rank = self._group_size = 0  # in the default group while it trains
        self._exchanges = False
        self._has_destroyed = False  # a group, of which the collectives were counted before

    def install(self) -> None:
        """Hooks into the watched modules, now or when the script imports them."""
        os.register_at_fork(after_in_child=self._start)
        atexit.register(self.report)  # runs after those that the script registers
        on_import(
            {
                "torch.distributed.distributed_c10d": self._watch_groups,
                "torch.optim.optimizer": self._watch_optimizers,
                "multiprocessing.util": self._watch_children,
                "multiprocessing.spawn": self._watch_spawned,
            }
        )

    def _watch_groups(self, module: Any) -> None:
        """Checks before a group is destroyed: afterwards, nobody knows what it has sent."""
        destroy = module.destroy_process_group

        @functools.wraps(destroy)
        def destroy_process_group(*args: Any, **kwargs: Any) -> None:
            self._read_recorder()
            self._has_destroyed = True
            destroy(*args, **kwargs)

        module.destroy_process_group = destroy_process_group
        sys.modules["torch.distributed"].destroy_process_group = destroy_process_group  # type: ignore[attr-defined]

    def _watch_optimizers(self, module: Any) -> None:
        torch: Any = sys.modules["torch"]  # which is being imported

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            # Traced where a step is compiled: no names of this module, which cannot be imported.
            if not torch.compiler.is_compiling():
                self._on_step(optimizer)

        # never removed: torch walks through the hooks, maybe also the script's, while it calls them
        module.register_optimizer_step_post_hook(after_step)

    def _watch_children(self, module: Any) -> None:
        module.register_after_fork(self, GradientWatch._report_at_child_exit)

    def _watch_spawned(self, module: Any) -> None:
        """Makes spawned processes run this module's text before they import the main module."""
        original = module.get_preparation_data
        watch = _InSpawned(self._rank_pid, self._events, self._source)

        def get_preparation_data(*args: Any, **kwargs: Any) -> Any:
            data = original(*args, **kwargs)
            data["gradient_watch"] = watch
            return data

        module.get_preparation_data = get_preparation_data

    def _report_at_child_exit(self) -> None:
        """Reports at the exit of a child of ``multiprocessing``, which does not run ``atexit``."""
        util: Any = sys.modules["multiprocessing.util"]
        util.Finalize(None, self.report, exitpriority=FINALIZER_PRIORITY)

    def _on_step(self, optimizer: Any) -> None:
        """Checks after 1, 2, 4, 8, … steps, until gradients have been exchanged."""
        if self._exchanges:
            return
        torch: Any = sys.modules["torch"]
        self._steps += 1
        if self._steps & (self._steps - 1):
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        distributed: Any = sys.modules.get("torch.distributed")
        if getattr(distributed, "is_initialized", bool)():
            self._group_rank, self._group_size = (
                distributed.get_rank(),
                distributed.get_world_size(),
            )
        parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        largest = max((tensor.numel() for tensor in parameters), default=0)
        self._largest_parameter = min(self._largest_parameter or largest, largest)
        if any(hasattr(tensor, "device_mesh") for tensor in parameters):  # one sharded model
            self._exchanges = True
        self._read_recorder()

    def _read_recorder(self) -> None:
        try:
            self._exchanges = self._exchanges or self._has_exchanged()
        except Exception:  # the recorder's form is torch's to change
            self._exchanges = True

    def _has_exchanged(self) -> bool:
        if any(name in sys.modules for name in OTHER_LIBRARIES):
            return True
        rpc: Any = sys.modules.get("torch.distributed.rpc.api")
        if rpc is not None and (rpc._ALL_WORKER_NAMES or rpc._is_current_rpc_agent_set()):
            return True
        if os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":  # the recorder is off
            return True
        dumps = _recorder_dumps()
        entries = [entry for dump in dumps for entry in dump.get("entries", ())]
        entries = [e for e in entries if e.get("time_created_ns", 0) >= self._started_ns]
        self._calls = max(self._calls, len(entries))
        large = max(LARGE_OBJECT_BYTES, self._largest_parameter)
        self._largest_call = max([self._largest_call, *(_elements(e, large) for e in entries)])
        was_lost = not (entries or self._has_destroyed) and any(
            dump.get("pg_config") for dump in dumps
        )
        if any(entry.get("is_p2p") for entry in entries) or _is_incomplete(entries, was_lost):
            return True
        return self._largest_call >= max(1, min(self._largest_parameter, MIN_GRADIENT_ELEMENTS))

    def report(self) -> None:
        """Reports what this process has exchanged; to be called at its end."""
        self._read_recorder()
        is_rank = os.getpid() == self._rank_pid
        if is_rank and self._exchanges:
            return
        if not is_rank and not (self._steps or self._calls):
            return
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        own_cpu_s = time.process_time() - self._started_cpu_s
        message = {
            "kind": "event", "event": EVENT, "optimizer_steps": self._steps, "calls": self._calls,
            "largest_call": self._largest_call, "exchanges": self._exchanges,
            "group_rank": self._group_rank, "group_size": self._group_size,
            # programs that this process started have done most of its work
            "in_children": usage.ru_utime + usage.ru_stime > own_cpu_s,
        }  # fmt: skip
        _write(self._rank_pid, self._events, message)


class _InSpawned:
    """Pickled into a spawned process, it installs a watch there."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments  # of GradientWatch

    def __reduce__(self) -> Any:
        source = self._arguments[-1]
        if source is None:
            return (dict, ())
        install = "\nGradientWatch(*ARGUMENTS).install(); register_stack_dump(*ARGUMENTS[:2])\n"
        names = {"__name__": "gradient_watch", "ARGUMENTS": self._arguments}
        return (exec, (source + install, names))


def register_stack_dump(rank_pid: int, events: int) -> None:
    """Makes this process write its stack to the rank's events when it gets the signal."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        fd = _open_events(rank_pid, events)
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False, chain=False)


class _ImportHook:
    """Calls a function with a module as soon as it has been imported."""

    def __init__(self, callbacks: Dict[str, Callable[[Any], None]]) -> None:
        self._callbacks = callbacks

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        callback = self._callbacks.pop(name, None)
        if callback is None:
            return None
        import importlib.util

        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return spec
        original = loader.exec_module

        def exec_module(module: Any) -> None:
            original(module)
            callback(module)

        loader.exec_module = exec_module
        return spec


def on_import(callbacks: Dict[str, Callable[[Any], None]]) -> None:
    """Calls each function with the module of its name, now or when the script imports it."""
    missing = {}
    for name, callback in callbacks.items():
        if name in sys.modules:
            callback(sys.modules[name])
        else:
            missing[name] = callback
    if missing:
        sys.meta_path.insert(0, _ImportHook(missing))


def _recorder_dumps() -> List[Dict[str, Any]]:
    """Returns torch's records of groups and of their latest collectives."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    return [json.loads(getattr(c10d, name)(True, False)) for name in names if hasattr(c10d, name)]


def _elements(entry: Dict[str, Any], large: int) -> int:
    """Returns the number of elements of the largest tensor in a collective.

    Tensors of fewer than ``large`` elements that may be pickled objects are ignored.
    """
    sizes = entry["input_sizes"] + entry["output_sizes"]
    dtypes = entry["input_dtypes"] + entry["output_dtypes"]
    tensors = [(math.prod(size), dtype) for size, dtype in zip(sizes, dtypes)]
    return max((n for n, dtype in tensors if n >= large or dtype not in OBJECT_DTYPES), default=0)


def _is_incomplete(entries: List[Dict[str, Any]], was_lost: bool) -> bool:
    """Whether a group may have done more than was recorded, such as gloo's sends.

    ``was_lost``: there was a group, of which nothing is known if it is gone.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    if world is None or not world.pg_names:
        return was_lost
    recorded: Dict[str, int] = {}
    for entry in entries:
        group = str(entry["process_group"][0])
        recorded[group] = max(recorded.get(group, 0), int(entry["collective_seq_id"]))
    return any(
        group._get_sequence_number_for_group() > recorded.get(str(name), 0)
        for group, name in world.pg_names.items()
    )


def _write(rank_pid: int, events: int, message: Dict[str, Any]) -> None:
    line = json.dumps(message).encode() + b"\n"
    try:
        if os.getpid() == rank_pid:
            os.write(events, line)
            return
        fd = _open_events(rank_pid, events)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
    except OSError:  # the rank has ended, and nobody reads it
        pass


def _open_events(rank_pid: int, events: int) -> int:
    return os.open("/proc/%d/fd/%d" % (rank_pid, events), os.O_WRONLY | os.O_NONBLOCK)
