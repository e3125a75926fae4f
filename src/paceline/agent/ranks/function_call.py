"""Calls a function in a rank: loads it from its file, and stores its result or exception.

The launching machine has put ``call`` into the run's folder: first what the rank has to be like,
with cloudpickle, which need not be installed here; then the function with its arguments.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import logging
import marshal
import os
import pickle
import sys
import types
from typing import Any, Callable, Dict

from . import pickles

Message = Dict[str, Any]
CALL_FILE = "call"  # below the run's folder
RESULTS_FOLDER = "returned"  # the folder below it for what ranks return or raise, a file a rank


class FunctionCall:
    """One rank's call.

    Args:
        entry: Of the job: ``args`` are folders from which modules are imported, ``sha256`` is what
            the launching machine says of the file, which may lie on a disk that others write to.
        report: Says something to the launching machine.
    """

    def __init__(self, entry: Message, report: Callable[[Message], None]) -> None:
        self._folders = entry["args"]
        self._report = report
        self._folder = os.environ["PACELINE_RUN_DIR"]
        self._rank = os.environ["RANK"]
        self._objects = pickles.open_objects(os.path.join(self._folder, CALL_FILE), entry["sha256"])
        self._settings: Message = self._objects.load()
        self._cloudpickle: Any = None

    @property
    def source(self) -> bytes:
        """The function's source text; empty if unknown."""
        return str(self._settings["source"]).encode(errors="replace")

    def run(self) -> None:
        """Calls the function and stores its result in a file."""
        self._adopt_settings()
        self._cloudpickle = _cloudpickle(self._settings["cloudpickle"])
        function, args, kwargs = self._objects.load()
        del self._objects
        _export_to_main(function)
        value = function(*args, **kwargs)
        if inspect.iscoroutine(value):
            asyncio: Any = importlib.import_module("asyncio")
            value = asyncio.run(value)
        try:
            self._save("returned", "what rank %s returned" % self._rank, value)
        except pickles.NotPicklableError as error:
            raise TypeError(str(error)) from None

    def _adopt_settings(self) -> None:
        """Adopts the launching program's main module, import paths and logging."""
        settings = self._settings
        version = "%d.%d" % sys.version_info[:2]
        if settings["python"] != version:
            raise RuntimeError(
                "the function was pickled by Python %s, and this is Python %s (%s): what one minor "
                "version has compiled another cannot run"
                % (settings["python"], version, sys.executable)
            )
        sys.argv = list(settings["argv"])
        if settings["file"]:
            sys.modules["__main__"].__file__ = settings["file"]
        folders = [folder for folder in self._folders if os.path.exists(folder)]
        sys.path[:0] = [folder for folder in folders if folder not in sys.path]
        for name, text in settings["sources"].items():  # for tracebacks, and for compilers
            linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        if settings["logging"]:
            logging.basicConfig(**settings["logging"]["basic"])
            for name, level in settings["logging"]["levels"].items():
                logging.getLogger(name).setLevel(level)

    def save_exception(self, error: BaseException) -> None:
        """Stores an exception, which the launching machine raises; its text is also reported."""
        if self._cloudpickle is None or not isinstance(error, Exception):
            return
        for parts in (error, (type(error), error.args, vars(error)), (type(error), error.args, {})):
            try:
                pickle.loads(self._cloudpickle.dumps(parts))  # noqa: S301 - our own
                self._save("raised", "the exception", parts)
            except Exception:  # noqa: S112 - the next form has less in it
                continue
            return

    def _save(self, kind: str, name: str, value: Any) -> None:
        """Writes the file completely, then reports it."""
        folder = os.path.join(self._folder, RESULTS_FOLDER)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, self._rank)
        written = pickles.write(path, [(name, value)], self._cloudpickle)
        self._report({"kind": kind, "bytes": written.size, "sha256": written.sha256})


def _cloudpickle(modules: Dict[str, bytes]) -> Any:
    """Imports the launching machine's cloudpickle, whether this machine has one or not.

    Pickles of one version are not always understood by another.
    """
    for name in [n for n in sys.modules if n.split(".")[0] == "cloudpickle"]:
        del sys.modules[name]
    for name, code in sorted(modules.items(), reverse=True):  # the inner module first
        module = types.ModuleType(name)
        module.__package__ = "cloudpickle"
        module.__file__ = "<cloudpickle>"
        if name == "cloudpickle":
            module.__path__ = []
        sys.modules[name] = module
        exec(marshal.loads(code), module.__dict__)  # noqa: S102, S302 - as trusted as the function
    sys.modules["cloudpickle"].cloudpickle = sys.modules["cloudpickle.cloudpickle"]  # type: ignore[attr-defined]
    return sys.modules["cloudpickle"]


def _export_to_main(function: Any) -> None:
    """Copies the function's names of its main module into this process's main module.

    A plain pickle, as ``torch.save`` makes one, finds classes there by their names.
    """
    while isinstance(function, functools.partial):
        function = function.func
    names = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__globals__", {})
    if names.get("__name__") == "__main__":
        main = vars(sys.modules["__main__"])
        main.update({name: value for name, value in names.items() if name not in main})
