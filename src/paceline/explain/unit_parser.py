"""Parses the lines of one stream into units. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.explain.exit_reports import parse_bad_termination, parse_box, parse_exit, parse_table
from paceline.explain.line_kinds import classify, is_foreign_frame, level_of
from paceline.explain.units import Exit, Frame, Kind, PythonError, Unit

MAX_MESSAGE_LINES = 40
MAX_BLOCK_LINES = 200
MAX_BOX_LINES = 16  # without rulers
MAX_PATCH_LINES = 5000
_TRACEBACK = "Traceback (most recent call last):"
_GLOG = re.compile(r"(?P<level>[IWEF])\d{4} [\d:.]{8,20} +\d{1,9} \S{1,200}(?<!\.go):\d{1,6}\] ?")
_C10D = re.compile(r"\[(?P<level>[IWEF])(?:\d{3,4} [\d:.]{8,30})? ?[\w./-]{1,100}:\d{1,6}\] ?")
_FRAME = re.compile(
    r'^[\s|+]*File "(?P<file>[^"]{1,1000})", line (?P<line>\d{1,9})(?:,? in (?P<in>\S{1,200}))?'
)
_CPP_FRAME = re.compile(r"frame #\d{1,4}: |#\d{1,3} \S{1,200} from /|<omitting python frames>")
_EXCEPTION = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w{0,60}\.){0,8}_?[A-Z]\w{0,80}"
    r"(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Refused|Fault|Warning)"
    r"|(?:[a-z_]\w{0,60}\.){1,8}(?:\w{0,60}error|timeout|Unsupported))(?::(?: |$)|$)"
)
_ANY_EXCEPTION = re.compile(
    r"(?P<type>[A-Za-z_][\w.]{0,200}(?:<locals>\.[\w.]{1,200}){0,4})(?::(?: |$)|$)"
)
_CHAINED = re.compile(
    r"(?:The above exception was the direct cause|During handling of the above exception)"
)
_OPENS_LIST = re.compile(r"[^:]{1,200}:$")  # without a program's name before it
_NESTED = re.compile(r"(?:Original |\(?.{0,80}?)Traceback \(most recent call last\):")
_NCCL = re.compile(
    r"(?P<host>[\w.-]{1,253}):(?P<pid>\d{1,9}):\d{1,9} \[\d{1,4}\] (?:.{0,200}? )?"
    r"NCCL (?P<level>INFO|WARN)|\[\d{1,4}\] \S{1,200}:\d{1,6} NCCL (?P<bare>WARN)"
)
_LIBRARY = re.compile(
    r"\[[\w.:-]{1,253}:\d{1,9} :\d{1,4}\] {1,20}\S{1,100}:\d{1,6} {1,4}UCX {1,4}(?P<ucx>[A-Z]{4,6})"
    r"|\S{0,80}\|CCL_(?P<ccl>[A-Z]{4,6})\||libfabric:\d{1,9}:.{0,200}?<(?P<fabric>\w{1,10})>"
    r"|\[(?:gloo|\S{0,200}gloo/\S{1,200}:\d{1,6})\] (?P<gloo>WARN|ERROR|INFO)"
    r"|\[\d{1,9}\] MPI startup\(\): "
    r"|\[[\d-]{10} [\d:]{8},\d{1,6} (?P<ray>[IWEF]) \d{1,9} \d{1,9}\] "
)
_WORKERS_FINISHED = "worker group successfully finished"
_ERROR_LEVELS = ("E", "F", "WARN", "ERROR", "FATAL")
_KERNEL = re.compile(
    r"NVRM: |\[ {0,8}\d{1,9}\.\d{3,6}\] |(?:.{0,200} )?kernel: (?:\[ {0,8}[\d.]{1,20}\] )?"
)
_KERNEL_HOST = re.compile(r"(?P<host>[\w.-]{1,253}) kernel: ")
_MESSAGE_LINE = re.compile(
    r"\s|nccl\w{1,40}Error|ncclInvalidUsage|Last error:|CUDA kernel errors might"
    r"|For debugging consider|Compile with `|Search for `|GPU device may|Device-side assert"
    r"|Exception raised from |frame #|Parameter indices|making sure |If you |You can |You must "
    r"|Please |Make sure |Cannot access|(?:Repository|Entry|Revision) Not Found|Access to |Check "
    r"|Retry |Url: |\d{3} |https?://|Set TORCH|Note:|See |Try |\*|- |\(\d\)|Missing key"
    r"|Unexpected key|size mismatch|Stack trace:|To |This |The following |In addition"
    r"|Memory on the node \(IP"
)
_PYTEST_START = re.compile(r"=+ test session starts =+")
_PYTEST_END = re.compile(
    r"(?:=+ )?\d{1,9} (?:passed|failed|error|skipped|deselected|xfailed"
    r"|warning)\w*\b.* in [\d.:]+ ?s?"
)
_PYTEST_SUMMARY = re.compile(
    r"=+ short test summary|(?:FAILED|ERROR) \S{1,500}(?:::|\.py\b)"
    r"|[.sxXEF]{1,200} {1,80}\[ {0,2}\d"
)
_UNITTEST_END = re.compile(r"Ran \d{1,9} tests? in [\d.]+s")
_TABLE_TRACEBACK = re.compile(r"\s{1,8}traceback {0,8}: Traceback \(most recent call last\):")
_TABLE_START = re.compile(r"\S.{0,300} FAILED ?$|Root Cause \(first observed failure\):")
_CRASH = re.compile(
    r"Fatal Python error: |terminate called |Memory access fault by GPU|libc\+\+abi: "
    r"|\*\*\* (?:SIG\w{3,6} \(@|Error in|stack smashing)|double free or corruption"
    r"|free\(\): invalid"
    r"|HSA_STATUS_ERROR|:\d:\S{1,100}\.cpp\s{0,9}:\d{1,5} ?: |Program received signal SIG"
    r"|!!!!!!! Segfault encountered|\w{3,12}\(\): (?:invalid|corrupted)"
    r"|(?:\[(?P<host>[\w.-]{1,253}):\d{1,9}\] )?\*\*\* Process received signal \*\*\*"
)
_CRASH_LINE = re.compile(
    r"$|\s|Current thread|Thread 0x|Extension modules|<Cannot show|what\(\)|Python runtime state|"
    r"Exception raised from|frame #|nccl\w{1,40}Error|Last error|\*\*\*|Aborted|Abort was called"
    r"|(?:\[[\w.-]{1,253}:\d{1,9}\] )?(?:Signal(?: code)?: |Failing at address: |\*\*\* "
    r"|\[ ?\d{1,3}\] )"  # Open MPI
)
_MPI_WORDS = ("MPI", "mpi", "ORTE", "PRTE", "PMIX", "orted", "prterun", "Framework:",
              "Local host:")  # fmt: skip
_MPI_FAILED = re.compile(
    r"(?:\[[^\]]{1,100}\] )?(?:mpirun|mpiexec|prterun|orterun|ORTE|PRTE|Open MPI) "
    r"(?:was unable to|has lost|could not|failed to|detected that one or more|noticed that )"
)
_MPI_FIELD = re.compile(
    r" {0,8}(?:Local host|Node|Executable|Host|Framework|Component|Process name|Exit code): {1,9}\S"
    r"|signal \d"
)
_MPI_HOST = re.compile(r" {0,8}(?:Local host|Node|Host): {1,9}(?P<host>[\w.-]{1,253})$")
_MPICH_END = re.compile(r"YOUR APPLICATION TERMINATED|This typically refers|Please see the FAQ")
_RULER = re.compile(r"^([-=*])\1{15,}\s*$")
_CUDA_ASSERT = re.compile(r"\S{1,300}:\d{1,6}: .{0,200}Assertion `.{1,300}` failed")
_COMMIT = re.compile(r"commit [0-9a-f]{7,40}(?: \(.{1,300}\))?$")  # git log
_COMMIT_LINE = re.compile(r"(?:Author|AuthorDate|Commit|CommitDate|Date|Merge): |\s|$")
_PATCH = re.compile(r"diff --(?:git|cc) |--- (?:a/|/dev/null)")
_PATCH_LINE = re.compile(
    r"[ +@\\-]|$|index [0-9a-f]|(?:new|deleted|old) (?:file )?mode |similarity index"
    r"|(?:rename|copy) (?:from|to) |Binary files |diff --"
)
_STARTS_UNIT = re.compile(
    r"\[[IWEF]\d|\[[IWEF] |srun: |slurmstepd: |pdsh@|={20}|-{20}|\[rank\d|RESULT |mpirun "
    r"|Process name"
    r"|\S{1,253}:\d{1,9}:\d{1,9} \[\d|sigkill_handler|terminate called|Fatal Python|paceline: "
)


# What Python writes above a traceback that does not end the program
_NOT_FATAL = re.compile(
    r"Exception ignored in|--- Logging error ---|Call stack:|Error in atexit\._run_exitfuncs"
    r"|Error in sys\.excepthook|Task exception was never retrieved|future: <"
)
_IN_THREAD = re.compile(r"Exception in thread \S")
_CUT_OFF = ("ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "EOFError")
_RESOURCE_TRACKER = "/multiprocessing/resource_tracker.py"
# What calls the handler of a request in a server, which answers with an error and goes on
_REQUEST_HANDLER = re.compile(
    r"/(?:socketserver|wsgiref/\w{1,40}|flask/app|werkzeug/\w{1,40}|starlette/[\w/]{1,60}"
    r"|uvicorn/protocols/[\w/]{1,60}|gunicorn/workers/\w{1,40}|django/core/handlers/\w{1,40}"
    r"|aiohttp/web_protocol|tornado/(?:web|http1connection))\.py$"
)
_LOGGED_LEVELS = ("ERROR", "CRITICAL", "FATAL", "WARN", "WARNING", "E", "W", "C")
_OTHER_KINDS = ("progress", "finish", "warning", "numeric")  # they never continue a message


class _Cursor:
    """The lines of a stream and the position of the next."""

    def __init__(self, lines: Sequence[str], numbers: Sequence[int] = (), host: str = "",
                 rank: int | None = None) -> None:  # fmt: skip
        self.lines: list[str] = []
        self.levels: list[str] = []
        for line in lines:
            head = _GLOG.match(line) if line[:1] in "IWEF" else None
            self.lines.append(line[head.end() :] if head else line)
            self.levels.append(head["level"] if head else "")
        self.numbers = numbers or range(len(lines))
        self.host, self.rank = host, rank
        self.index = 0

    def unit(self, kind: Kind, end: int, text: str = "", *, level: str = "", host: str = "",
             errors: tuple[PythonError, ...] = (), exits: tuple[Exit, ...] = (),
             is_handled: bool = False) -> Unit:  # fmt: skip
        """Makes a unit of the lines up to ``end`` and moves behind them."""
        start, self.index = self.index, max(end, self.index + 1)
        lines = tuple(self.lines[start : self.index])
        return Unit(kind, self.numbers[start], lines, text or "\n".join(lines), self.host or host,
                    self.rank, level, errors, exits, is_handled)  # fmt: skip

    def end_of(self, accepts: Callable[[str], object], start: int, limit: int) -> int:
        """The index behind the lines from ``start`` that are accepted."""
        end = start
        while end < min(len(self.lines), start + limit) and accepts(self.lines[end]):
            end += 1
        return end


def parse_units(lines: Sequence[str], numbers: Sequence[int] = (), host: str = "",
                rank: int | None = None) -> list[Unit]:  # fmt: skip
    """Parses the lines of one stream.

    Args:
        numbers: Of the lines in the whole log; by default, from 0.
        host, rank: Whose stream it is, if known.
    """
    cursor = _Cursor(lines, numbers, host, rank)
    units: list[Unit] = []
    tests_end = _tests_end(cursor.lines)
    while cursor.index < len(cursor.lines):
        line = cursor.lines[cursor.index]
        if not line or line.isspace():
            cursor.index += 1
        elif cursor.index < tests_end or ("= test session" in line and _PYTEST_START.search(line)):
            units.append(_test_report(cursor, tests_end))
        else:
            units.append(_mark_logged(_next_unit(cursor, line), units))
    return units


def _next_unit(cursor: _Cursor, line: str) -> Unit:
    for recognise in _RECOGNISERS:
        if unit := recognise(cursor, line):
            return unit
    return _plain(cursor, line)


def _mark_logged(unit: Unit, before: Sequence[Unit]) -> Unit:
    """Marks a traceback of which Python, or its introduction, says that the program went on."""
    if unit.kind != "traceback":
        return unit
    error = unit.error
    if error and error.frames:
        outermost, innermost = error.frames[0].file, error.frames[-1].file
        if innermost.endswith(_RESOURCE_TRACKER) or _REQUEST_HANDLER.search(outermost):
            return replace(unit, is_handled=True)
    if not before or before[-1].number < unit.number - 2:
        return unit
    last_line = before[-1].lines[-1]
    if _NOT_FATAL.match(last_line):
        return replace(unit, is_handled=True)
    if _IN_THREAD.match(last_line):
        signs = (other.kind for other in reversed(before) if other.sign_of_life > 1)
        has_ended = next(signs, "") == "finish"
        is_loader = "(_pin_memory_loop)" in last_line and error and error.type in _CUT_OFF
        return replace(unit, level="logged", is_handled=bool(has_ended or is_loader))
    return replace(unit, level="logged") if level_of(last_line) in _LOGGED_LEVELS else unit


def _tests_end(lines: Sequence[str]) -> int:
    """The end of a report of unit tests without a heading; 0 without one."""
    end = 0
    has_summary = False
    for index, line in enumerate(lines):
        has_summary = has_summary or _PYTEST_SUMMARY.match(line) is not None
        if line[:1] not in "=R0123456789":
            continue
        is_marked = has_summary or (line.startswith("===") and line.endswith("==="))
        if _UNITTEST_END.match(line) or (is_marked and _PYTEST_END.match(line)):
            end = index + 1
    return end


def _test_report(cursor: _Cursor, end: int) -> Unit:
    """A report of pytest or unittest, up to its last line: its failures are those of tests."""
    if end <= cursor.index:
        rest = range(cursor.index + 1, len(cursor.lines))
        ends = (index + 1 for index in rest if _PYTEST_END.match(cursor.lines[index]))
        end = next(ends, len(cursor.lines))
    return cursor.unit("foreign", end)


# --- tracebacks -----------------------------------------------------------------------------------


def _traceback(cursor: _Cursor, line: str) -> Unit | None:
    is_start = _TRACEBACK in line and "Original" not in line[:9]
    if not is_start and not _FRAME.match(line):
        return None
    indent = len(line) - len(line.lstrip()) if is_start else 0
    if indent:
        return _indented_traceback(cursor, indent)
    index = cursor.index + is_start
    errors: list[PythonError] = []
    while True:
        error, index = _parse_error(cursor, index)
        errors.append(error)
        follower = _chained_start(cursor.lines, index)
        if follower is None or len(errors) > 20:
            break
        index = follower
    errors = [error for error in errors if error.type] or errors[-1:]
    text = "\n".join(error.message for error in errors)
    return cursor.unit("traceback", index, text or line, errors=tuple(errors), level="error")


def _indented_traceback(cursor: _Cursor, indent: int) -> Unit | None:
    """A traceback inside another message, as a launcher shows it."""
    end = cursor.end_of(lambda line: line[:indent].isspace(), cursor.index, MAX_BLOCK_LINES)
    inner = _Cursor([line[indent:] for line in cursor.lines[cursor.index : end]])
    unit = _traceback(inner, inner.lines[0])
    if unit is None:
        return None
    return cursor.unit("traceback", end, unit.text, errors=unit.errors, level="error")


def _parse_error(cursor: _Cursor, index: int) -> tuple[PythonError, int]:
    """Frames, then the exception's line and the rest of its message."""
    frames = []
    while index < len(cursor.lines):
        line = cursor.lines[index]
        if frame := _FRAME.match(line):
            frames.append(Frame(frame["file"], int(frame["line"]), frame["in"] or "<module>"))
        elif not line.startswith((" ", "\t")):
            break
        index += 1
    if index >= len(cursor.lines):
        return PythonError("", "", tuple(frames)), index
    line = cursor.lines[index]
    kind = _ANY_EXCEPTION.match(line)
    is_message = frames and line.strip() and _TRACEBACK not in line
    if kind is None and (not is_message or _STARTS_UNIT.match(line)):
        return PythonError("", "", tuple(frames)), index
    end = _message_end(cursor, index)
    message = "\n".join(cursor.lines[index:end]).strip()
    return PythonError(kind["type"] if kind else "", message, tuple(frames)), end


def _message_end(cursor: _Cursor, start: int) -> int:
    """The index behind a message that begins with an exception's line."""
    lines, levels = cursor.lines, cursor.levels
    end = start + 1
    limit = min(len(lines), start + MAX_MESSAGE_LINES)
    was_logged = cursor.index > 0 and level_of(lines[cursor.index - 1]) in _LOGGED_LEVELS
    last = start
    while end < limit:
        line = lines[end]
        if not line.strip():
            end += 1
            continue
        is_direct = last == end - 1
        is_open = not was_logged and (last > start or lines[start].endswith((":", ",", "(", "["))
                                      or _OPENS_LIST.match(line) is not None)  # fmt: skip
        if (_NESTED.match(line) or _CHAINED.match(line) or _STARTS_UNIT.match(line) or levels[end]
                or level_of(line) or classify(line)[0] in _OTHER_KINDS
                or end - last > 2):  # fmt: skip
            break
        if not (_MESSAGE_LINE.match(line) or (is_direct and lines[last].endswith((":", ",")))
                or (is_direct and is_open and _ends_soon(cursor, end))):  # fmt: skip
            break
        last = end
        end += 1
    return last + 1


def _ends_soon(cursor: _Cursor, index: int) -> bool:
    """Whether the stream, or what this process wrote, ends within a few lines."""
    following = cursor.lines[index : index + 5]
    return (index + 4 >= len(cursor.lines) or any(map(_STARTS_UNIT.match, following))
            or not all(line.strip() for line in following))  # fmt: skip


def _chained_start(lines: Sequence[str], index: int) -> int | None:
    """The index behind the heading of the next traceback of a chain."""
    for at in range(index, min(len(lines), index + 4)):
        line = lines[at]
        if _CHAINED.match(line):
            for heading in range(at + 1, min(len(lines), at + 4)):
                if _TRACEBACK in lines[heading]:
                    return heading + 1
            return None
        if _NESTED.match(line) and "Original" in line:
            return at + 1
        if line.strip():
            return None
    return None


def _exception_line(cursor: _Cursor, line: str) -> Unit | None:
    match = _EXCEPTION.match(line)
    if match is None or match["type"].endswith("Warning") or classify(line)[0] == "foreign":
        return None
    error, end = _parse_error(cursor, cursor.index)
    if any(map(is_foreign_frame, cursor.lines[cursor.index : end + 1])):
        return cursor.unit("foreign", end)
    is_handled = bool(re.search(r"\((?:caught|handled|ignored)|retrying", error.message))
    return cursor.unit("traceback", end, error.message, errors=(error,), level="error",
                       is_handled=is_handled)  # fmt: skip


# --- crashes, reports, libraries ------------------------------------------------------------------


def _crash(cursor: _Cursor, line: str) -> Unit | None:
    match = _CRASH.match(line)
    if match is None and not _CUDA_ASSERT.match(line):
        return None
    end = cursor.end_of(_CRASH_LINE.match, cursor.index + 1, MAX_BLOCK_LINES)
    lines = cursor.lines[cursor.index : end]
    frames = tuple(Frame(frame["file"], int(frame["line"]), frame["in"] or "<module>")
                   for frame in map(_FRAME.match, lines) if frame)  # fmt: skip
    text = "\n".join(line for line in lines if not _CPP_FRAME.match(line))
    error = PythonError("", text, tuple(reversed(frames)))
    host = (match["host"] or "") if match else ""
    return cursor.unit("crash", end, text, level="error", errors=(error,) * bool(frames), host=host)


def _table(cursor: _Cursor, line: str) -> Unit | None:
    """torchrun's table of failures, from its ruler or from its heading."""
    lines, index = cursor.lines, cursor.index
    start = index + 1 if _RULER.match(line) else index
    if start >= len(lines) or not _TABLE_START.match(lines[start]):
        return None
    end = start + 1
    while end < min(len(lines), start + MAX_BLOCK_LINES) and not lines[end].startswith("====="):
        end += 1
    exits = parse_table(lines[start:end])
    if not exits:
        return None
    errors: tuple[PythonError, ...] = ()
    for at in range(start, end):
        if exits[0].is_root and not errors and _TABLE_TRACEBACK.match(lines[at]):
            inner = _Cursor([line[4:] for line in lines[at + 1 : end]])
            errors = (_parse_error(inner, 0)[0],)
    text = errors[0].message if errors else ""
    kind: Kind = "traceback" if text else "exit"
    return cursor.unit(
        kind, end + 1, text, exits=exits, errors=errors if text else (), level="error"
    )


def _box(cursor: _Cursor, line: str) -> Unit | None:
    """A message between two rulers, as MPI's launchers print them."""
    if not _RULER.match(line):
        return None
    lines = cursor.lines
    end = cursor.end_of(lambda other: not _RULER.match(other), cursor.index + 1, MAX_BLOCK_LINES)
    if end >= len(lines) or end == cursor.index + 1:
        return cursor.unit("text", cursor.index + 1, level="info")
    block = lines[cursor.index : end + 1]
    if "BAD TERMINATION" in block[1]:
        end = cursor.end_of(_MPICH_END.match, end + 1, 3)
        exits = parse_bad_termination(lines[cursor.index : end])
        return cursor.unit("exit", end, exits=exits, level="error")
    if not any(word in "\n".join(block) for word in _MPI_WORDS):
        return cursor.unit("text", cursor.index + 1, level="info")
    return _mpi_message(cursor, end + 1, block)


def _unruled_box(cursor: _Cursor, line: str) -> Unit | None:
    """The same without its rulers, as prefixes and cuts leave it."""
    if not _MPI_FAILED.match(line):
        return None
    end = cursor.end_of(lambda other: not _RULER.match(other), cursor.index + 1, MAX_BOX_LINES)
    fields = [at for at in range(cursor.index, end) if _MPI_FIELD.match(cursor.lines[at])]
    end = fields[-1] + 1 if fields else cursor.index + 1
    return _mpi_message(cursor, end, cursor.lines[cursor.index : end])


def _mpi_message(cursor: _Cursor, end: int, block: Sequence[str]) -> Unit:
    """A message of MPI's launcher: how a process ended, or what else it reports."""
    if exited := parse_box(block):
        return cursor.unit("exit", end, exits=(exited,), level="error")
    return cursor.unit("library", end, level="error", host=_box_host(block))


def _box_host(lines: Sequence[str]) -> str:
    return next((match["host"] for line in lines if (match := _MPI_HOST.match(line))), "")


def _exit(cursor: _Cursor, line: str) -> Unit | None:
    end = parse_exit(line)
    if end is None or _KERNEL.match(line) or classify(line)[0] == "foreign":
        return None
    return cursor.unit("exit", cursor.index + 1, exits=(end,), level="error")


def _library(cursor: _Cursor, line: str) -> Unit | None:
    glog = cursor.levels[cursor.index]
    match = _C10D.match(line) or _NCCL.match(line) or _LIBRARY.match(line)
    if match is None and not glog:
        return None
    if _WORKERS_FINISHED in line:
        return cursor.unit("finish", cursor.index + 1)
    groups = match.groupdict() if match else {}
    values = [value for key, value in groups.items() if value and key not in ("host", "pid")]
    is_error = any(value in _ERROR_LEVELS for value in [*values, glog])
    is_warning = "W" in (groups.get("level"), glog) or groups.get("fabric") == "warn"
    level = "error" if is_error else "warning" if is_warning else "info"
    end = cursor.index + 1
    if groups.get("level") in ("E", "W", "F"):
        end = _library_end(cursor, end)
    elif groups.get("ccl") or groups.get("ucx"):
        end = cursor.end_of(re.compile(r" |failed to ").match, end, 3)
    lines = [line for line in cursor.lines[cursor.index : end] if not _CPP_FRAME.match(line)]
    return cursor.unit("library", end, "\n".join(lines), level=level, host=groups.get("host") or "")


def _library_end(cursor: _Cursor, start: int) -> int:
    lines = cursor.lines
    end = start
    while end < min(len(lines), start + MAX_BLOCK_LINES):
        line = lines[end]
        is_continued = (
            _CPP_FRAME.match(line)
            or lines[end - 1].endswith("Last error:")
            or re.match(r"nccl\w{1,40}(?:Error|Usage): |Last error:|Exception raised from ", line)
        )
        if not is_continued:
            break
        end += 1
    return end


def _kernel(cursor: _Cursor, line: str) -> Unit | None:
    match = _KERNEL.match(line) if line[:1] in "N[" or "kernel: " in line else None
    if match is None:
        return None
    named = _KERNEL_HOST.search(match[0])
    host = named["host"] if named else ""
    return cursor.unit("kernel", cursor.index + 1, level="info", host=host)


# --- lines ----------------------------------------------------------------------------------------


def _plain(cursor: _Cursor, line: str) -> Unit:
    end = cursor.index + 1
    if end < len(cursor.lines) and is_foreign_frame(cursor.lines[end]):
        return cursor.unit("foreign", cursor.end_of(is_foreign_frame, end, MAX_BLOCK_LINES))
    if _COMMIT.match(line):
        return cursor.unit("foreign", cursor.end_of(_COMMIT_LINE.match, end, MAX_BLOCK_LINES))
    if _PATCH.match(line):
        return cursor.unit("foreign", cursor.end_of(_PATCH_LINE.match, end, MAX_PATCH_LINES))
    kind, level = classify(line)
    return cursor.unit(kind, end, level=level)


_RECOGNISERS = (
    _traceback,
    _exception_line,
    _crash,
    _table,
    _box,
    _unruled_box,
    _exit,
    _library,
    _kernel,
)
