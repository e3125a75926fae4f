"""Turns a fork of the server into a rank that runs the user's script like ``python script.py``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
import zipfile
from typing import Any, Callable, Dict, List

from .. import warm
from ..supervision import gloo_threads, processes
from . import (
    clear_connections,
    flight_recorder,
    gloo_peers,
    gradient_watch,
    interpreter_exit,
    master_address,
    process_title,
    replica_watch,
    stack_dump,
)

Message = Dict[str, Any]
DEFAULT_SIGNALS = (  # what the agent, or the background of whoever started it, ignores
    signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1,
    signal.SIGUSR2,
)  # fmt: skip
_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(__file__))  # folder of the package
TRACEBACK_LIMIT = 16000  # characters; a pipe holds 64 KiB


def prepare(request: Message, rank: Message, out: int, err: int, events: int,
            control: int) -> Callable[[], int]:  # fmt: skip
    """Turns this fork into ``rank``; returns the remaining work.

    Args:
        request: ``entry`` ({"kind", "target", "args"}, perhaps "local_rank_flag"), ``workdir``,
            ``env`` of the node, ``login`` (``env``, ``umask``; the server may be older).
        rank: ``local_rank``, ``env``, ``cpus`` (may be empty).
        out, err, events: Write ends of the rank's pipes.
        control: Read end of its control pipe.
    """
    for signum in DEFAULT_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _redirect(out, err)
    for fd in (events, control):
        os.set_inheritable(fd, True)
    for name in warm.LOGIN_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(request["login"]["env"])
    os.umask(request["login"]["umask"])
    os.environ.update(request["env"])
    os.environ.update(rank["env"])
    os.environ["PACELINE_EVENT_FD"] = str(events)
    os.environ["PACELINE_CONTROL_FD"] = str(control)
    # gloo reads all addresses in two requests to the store, not in three for each rank
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    _name_process(rank, request["entry"])
    stack_dump.register(events)
    flight_recorder.block_signal()
    if rank.get("cpus"):
        with contextlib.suppress(OSError):  # the CPUs may have been taken from us meanwhile
            os.sched_setaffinity(0, rank["cpus"])
    # the user's code must find no trace of the agent in the interpreter
    archive = os.path.dirname(os.path.abspath(_PACKAGE_FOLDER))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != archive]
    _apply_debug_level()
    watch_process_group(events, any_world=bool(request.get("any_world")))
    trains_together = rank["env"].get("WORLD_SIZE", "1") != "1" and not request.get("any_world")
    if trains_together and request["entry"]["kind"] != "binary":
        gradient_watch.GradientWatch(os.getpid(), events, gradient_watch.SOURCE).install()
        options = {name: bool(request.get(name)) for name in ("verify", "measure")}
        if any(options.values()):
            report = functools.partial(_report, events)
            replica_watch.ReplicaWatch(report, **options).install()
    method = request["env"].get("PACELINE_COMMUNICATION")
    if method:
        scripts: Any = sys.modules["paceline.train.ddp.scripts"]  # by the fork server
        gradient_watch.on_import(scripts.install(method))
    return lambda: run(request["entry"], request["workdir"], events)


def _apply_debug_level() -> None:
    """Sets torch's debug level from the rank's environment; the fork server imported it before."""
    distributed: Any = sys.modules.get("torch.distributed")
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ and distributed is not None:
        with contextlib.suppress(AttributeError, RuntimeError):  # built without; a misspelt level
            distributed.set_debug_level_from_env()


def _name_process(rank: Message, entry: Message) -> None:
    """Sets the process's name for ``top``, at most 15 bytes, and its command line.

    ``rank3 train.py`` and ``python train.py --lr 0.1 [rank 3 of 4, n2]``.
    """
    process_title.show(*process_title.rank_title(entry, rank["env"]))
    name = "rank%s %s" % (rank["env"].get("RANK", "?"), os.path.basename(entry["target"]))
    with contextlib.suppress(OSError):
        processes.set_name(name)


def _redirect(out: int, err: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    for stream in (sys.stdout, sys.stderr):
        # lines, not blocks: the output is followed live although it is a pipe
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def run(entry: Message, workdir: str, events: int) -> int:
    """Runs the entry to the process's end; returns the status of an ordinary end.

    ``events`` is the descriptor of the rank's events.
    """
    try:
        status = run_entry(entry, workdir, events)
    except SystemExit as exit_request:
        if interpreter_exit.is_safe():
            raise
        status = interpreter_exit.exit_status(exit_request)
    if status < 0 or not interpreter_exit.is_safe():
        interpreter_exit.exit_process(status)
    return status


def run_entry(entry: Message, workdir: str, events: int) -> int:
    """Runs the script, module, function or program; returns its exit status, if it returns.

    A negative one is the number of the signal of which the process is to die.
    """
    call: Any = None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.EXIT_SIGNALS)  # it is a rank now
        enter_folder(workdir)
        if entry["kind"] == "binary":
            return _execute([entry["target"], *_arguments(entry)])
        if entry["kind"] == "function":
            from .function_call import FunctionCall  # here, for scripts need none of it

            call = FunctionCall(entry, functools.partial(_report, events))
        _run_python(entry, call)
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        traceback.print_exception(type(error), error, _trim_traceback(error).__traceback__)
        return -signal.SIGINT  # what Python itself does, so that the parent sees it
    except BaseException as error:
        _disarm_sigchld()
        if call is not None:
            call.save_exception(error)
        _report_exception(error, events)
        if isinstance(error, RuntimeError):  # as a collective's is
            flight_recorder.write_final(events)
        sys.excepthook(type(error), error, _trim_traceback(error).__traceback__)
        return 1
    return 0


def enter_folder(folder: str) -> None:
    """Changes to the work folder, and has relative folders of PYTHONPATH lie below it.

    The fork server has started elsewhere, before the folder was there.
    """
    former = os.getcwd()
    os.chdir(folder)
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    moved = {
        os.path.abspath(os.path.join(former, entry)): os.path.abspath(entry)
        for entry in entries
        if entry and not os.path.isabs(entry)
    }
    sys.path[:] = [moved.get(path, path) for path in sys.path]


def _arguments(entry: Message) -> List[str]:
    flag = entry.get("local_rank_flag")
    rank_args = ["%s=%s" % (flag, os.environ["LOCAL_RANK"])] if flag else []
    return rank_args + list(entry["args"])


def _execute(argv: List[str]) -> int:
    """Executes the program in place of this process, with ``os.environ``."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    flight_recorder.release_signal()
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write("paceline: cannot run %s: %s\n" % (argv[0], error.strerror))
        return 127 if isinstance(error, FileNotFoundError) else 126


def _run_python(entry: Message, call: Any = None) -> None:
    target, args = entry["target"], _arguments(entry)
    master_address.follow_plan(_source(entry) if call is None else call.source)
    _unload_agent()
    _reseed()
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    sys.argv = [target, *args]
    if call is not None:
        call.run()
    elif entry["kind"] == "module":
        if not target.startswith("paceline."):  # the folder may be a run directory
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
    elif os.path.isdir(target) or zipfile.is_zipfile(target):
        runpy.run_path(target, run_name="__main__")
    else:
        _run_file(os.path.abspath(target), main)


def _source(entry: Message) -> bytes:
    """Returns the script's text; empty for modules, folders and archives."""
    if entry["kind"] == "script" and os.path.isfile(entry["target"]):
        with open(entry["target"], "rb") as file:
            return file.read()
    return b""


def _run_file(path: str, main: types.ModuleType) -> None:
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    with open(path, "rb") as file:
        source = file.read()
    main.__file__ = path
    # dont_inherit: the script must not get this module's __future__ imports
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - it is the user's script


def _unload_agent() -> None:
    package = __name__.rsplit(".", 2)[0]
    for name in [n for n in sys.modules if n == package or n.startswith(package + ".")]:
        del sys.modules[name]


def _reseed() -> None:
    """Resets state from imports that must differ between forks, such as random generators."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # Python's own generator reseeds itself after a fork
    torch_random = sys.modules.get("torch.random")
    if torch_random is not None:  # a GPU's generator is made, and seeded, in the rank
        torch_random.default_generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:  # spawned children find a relative main script from here
        processes.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]


def watch_process_group(events: int, *, any_world: bool = False) -> None:
    """Reports joining and leaving the world, and checks it against the plan.

    Its gloo groups accept connections of the job's hosts only.

    Args:
        events: Descriptor for events.
        any_world: Other worlds than the planned one are accepted.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    original = distributed.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        flight_recorder.mark_start()
        _report_event(events, "joining")
        result = original(*args, **kwargs)
        flight_recorder.start_thread(events)
        _report_joined(distributed, events, any_world)
        return result

    gloo_peers.install(
        distributed.distributed_c10d,
        on_reject=functools.partial(_report_stranger, events, "stranger refused"),
        on_stranger=functools.partial(_report_stranger, events, "stranger"),
    )
    clear_connections.install(distributed)
    distributed.init_process_group = init_process_group
    distributed.distributed_c10d.init_process_group = init_process_group
    destroy = distributed.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> Any:
        if distributed.is_initialized() and group in (None, distributed.group.WORLD):
            _report_event(events, "world left", rank=distributed.get_rank())
        # A worker frees a collective's tensor a moment after the collective has returned, and waits
        # for the interpreter's lock. The group's destructor joins that worker, with the lock held
        # if DDP drops the group last: neither would go on.
        gloo_threads.wait_for_idle_workers()
        return destroy(group)

    distributed.destroy_process_group = destroy_process_group
    distributed.distributed_c10d.destroy_process_group = destroy_process_group


def _report_stranger(events: int, event: str, address: str) -> None:
    _report_event(events, event, address=address, time=time.monotonic())


def _report_event(events: int, event: str, **fields: Any) -> None:
    _report(events, {"kind": "event", "event": event, **fields})


def _report_joined(distributed: Any, events: int, any_world: bool) -> None:
    actual = (distributed.get_rank(), distributed.get_world_size())
    planned = actual
    if not any_world:
        planned = (int(os.environ["RANK"]), int(os.environ["PACELINE_WORLD_SIZE"]))
    if actual != planned:
        raise RuntimeError(
            "the world is not the planned one: this process became rank %d of %d, "
            "but the plan says rank %d of %d. The script passed its own rank or world size to "
            "init_process_group; take them from RANK and WORLD_SIZE (or run with --any-world)."
            % (*actual, *planned)
        )
    backend = distributed.get_backend()
    _report_event(events, "world joined", rank=actual[0], world_size=actual[1], backend=backend)


def _trim_traceback(error: BaseException) -> BaseException:
    """Removes the agent's and runpy's frames from the top of a traceback."""
    internal = (_PACKAGE_FOLDER + os.sep, runpy.__file__, "<frozen runpy")
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename.startswith(internal):
        step = step.tb_next
    return error.with_traceback(step)


def _disarm_sigchld() -> None:
    """Keeps SIGCHLD handlers, such as torch's for killed workers, from raising."""
    for _ in range(2):  # it may raise here, once
        with contextlib.suppress(Exception):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _report_exception(error: BaseException, events: int) -> None:
    trimmed = _trim_traceback(error).__traceback__
    lines = traceback.format_exception(type(error), error, trimmed)
    hook = sys.excepthook  # torch's only adds the rank's number
    is_torch = str(getattr(hook, "__module__", "")).startswith("torch.")
    report = {
        "kind": "exception",
        "type": type(error).__name__,
        "message": str(error)[:2000],
        "traceback": "".join(lines)[-TRACEBACK_LIMIT:],
        "hooked": hook is not sys.__excepthook__ and not is_torch,
        "origin": getattr(error, "origin_rank", None),
        "time": time.monotonic(),
    }
    _report(events, report)


def _report(events: int, message: Message) -> None:
    """Writes one line to the agent, small enough for the pipe's buffer."""
    line = json.dumps(message).encode() + b"\n"
    with contextlib.suppress(OSError):
        os.write(events, line)
