"""Strips what collectors and launchers write before each line of a log, in any nesting. Pure.

A prefix whose form cannot be mistaken (a time stamp, ``[rank3]:``) is stripped wherever it stands.
Any other label (``10.0.0.3: ``, ``worker-1 | ``, ``[3] ``) counts as a prefix only if most lines
have it, or those lines of tracebacks that do not start where they should.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from paceline.explain.line_kinds import SYSTEM_DAEMONS, is_foreign

MAX_LAYERS = 6
MIN_LABELED_SHARE = 0.6
MIN_LABELED_LINES = 2  # in a log of so few lines, all
MAX_SAMPLE = 2000  # lines of a long log that show whether it is worth to look at all
MAX_HEAD = 200  # characters of a prefix

_DATE = r"\d\d(?:\d\d)?[-/]\d\d[-/]\d\d"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_ZONE = r"(?:Z| ?UTC| ?[+-]\d\d:?\d\d)?"
_TIME = rf"(?:{_DATE}[T _]{_CLOCK}{_ZONE}|{_CLOCK}{_ZONE})"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
# Prefixes that cannot be mistaken for ordinary text, by their first characters.
_BY_START = {
    "[": (
        r"\[(?=[^/\]]{0,253}[A-Za-z.])(?P<host>[A-Za-z0-9][\w.-]{0,252})/(?P<rank>\d{1,9})\] ?",
        r"\[1,(?P<rank>\d{1,9})\]<(?:stdout|stderr|stddiag)>: ?",  # mpirun --tag-output
        r"\[rank ?(?P<rank>\d{1,9})\]:?(?:\[[A-Za-z0-9][\w.-]{0,252}\])? ?",  # torch
        r"\[default(?P<rank>\d{1,9})\]: ?",  # torchrun --tee
        r"\[pod/(?P<host>[\w.-]{1,253})/[\w.-]{1,253}\](?: |$)",  # kubectl logs --prefix
        rf"\[{_TIME}\](?: |$|(?=\[))",
    ),
    "(": (
        r"\((?P<label>[\w.:<>-]{1,100}(?: rank=(?P<rank>\d{1,9}))?(?:,? pid=\d{1,9})"
        r"(?:, ip=(?P<host>[\w.:]{1,100}))?)\) ?",  # Ray
        r"\((?:raylet|autoscaler|gcs_server)(?:, ip=(?P<host>[\w.:]{1,100}))?\) ",
    ),
    "0123456789": (
        rf"{_TIME} (?P<host>[\w.-]{{1,253}}) (?!kernel|(?:{SYSTEM_DAEMONS})\b)[\w./@-]{{1,100}}"
        r"\[\d{1,9}\]:(?: |$)",  # syslog
        rf"{_TIME} std(?:out|err) [FP](?: |$)",  # a container runtime's log file
        rf"{_TIME}(?:: | - | |\t|$)",
    ),
    "JFMASOND": (
        rf"{_MONTH} [ \d]\d {_CLOCK} (?P<host>[\w.-]{{1,253}}) "
        rf"(?!kernel|(?:{SYSTEM_DAEMONS})\b)[\w./@-]{{1,100}}(?:\[\d{{1,9}}\])?:(?: |$)",  # syslog
    ),
    "DIWEC": (  # vLLM
        r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d "
        r"\[?[\w./]{1,100}\.py:\d{1,6}\] ?",
    ),
}
_UNAMBIGUOUS = {
    start: tuple(re.compile(f"^(?:{pattern})") for starts, patterns in _BY_START.items()
                 for pattern in patterns if start in starts)
    for start in "".join(_BY_START)
}  # fmt: skip
# The journal of a system, and which of its programs may be a training job
_JOURNAL = re.compile(
    rf"(?:{_MONTH} [ \d]\d {_CLOCK}|{_TIME}) [\w.-]{{1,253}} (?P<program>[\w./@-]{{1,100}})"
    r"(?:\[\d{1,9}\])?: "
)
_DAEMON = re.compile(rf"(?:{SYSTEM_DAEMONS})\b")
_JOB_PROGRAM = re.compile(
    r"(?i:python|torch|train|slurm|srun|mpi|ray|deepspeed|accelerate|paceline|kernel|nvidia|enroot"
    r"|docker|containerd|kubelet)"
)
_JOB_WORD = re.compile(
    r"(?i:\b(?:rank ?\d|torch\w{0,10}|cuda|nccl|rccl|gloo|epoch|loss|gpus?|checkpoint)\b"
    r"|-packages/torch/)"
)
# Prefixes that may also be ordinary text.
_AMBIGUOUS = tuple(
    re.compile(f"^(?:{pattern})")
    for pattern in (
        r"(?P<label>[A-Za-z0-9][\w.-]{0,252})\s{0,40}\| ?",  # docker compose
        r" {0,9}(?P<rank>\d{1,9}):(?!\d) ?",  # srun -l
        r"(?P<host>[A-Za-z0-9](?:[\w-]|\.(?=\w)){0,252}): ",  # pdsh, which DeepSpeed uses
        r"\[(?P<label>[\w.:/ =-]{1,80})\]:? ",  # mpiexec -l and others
        r"\((?P<label>[\w.:/, =-]{1,80})\):? ",
        r"(?=\S{0,63}-)(?=\S{0,63}\d)(?P<host>[a-z0-9][a-z0-9-]{1,62}) [a-z][a-z0-9-]{0,62} ",
        r"(?P<level>DEBUG|INFO|WARN(?:ING)?|ERROR)(?: {1,5}-? ?|\t|: ?|\] ?)",
        r"(?P<label>[A-Za-z0-9][\w.-]{0,252})> ",
    )
)
_ANCHOR = re.compile(
    r'Traceback \(most recent call last\):|  File "[^"]{1,1000}", line \d'
    r"|terminate called after|Fatal Python error: "
)
_PDSH = re.compile(r"^pdsh@[\w.-]{1,253}: (?P<host>[\w.-]{1,253}): ")
_RANK_WORD = re.compile(r"\b(?:rank|task)[ =_:-]?(\d{1,9})\b")
# A label that few lines have, before torch's own
_BEFORE_RANK = re.compile(
    r"^(?=\S{0,63}[\d-])(?P<host>[A-Za-z0-9][\w.-]{0,252}):? (?=\[rank ?\d{1,9}\]:)"
)
_RANK_END = re.compile(r"\brank[ =:_-]?$", re.IGNORECASE)
_RANK_MARK = re.compile(r"\[rank ?\d{1,9}\]")
_RANK_HEAD = re.compile(r"\W{0,3}rank[ =:_-]?(?P<rank>\d{1,9})\b", re.IGNORECASE)
_VARYING = re.compile(r"\d\w*")
_NO_HOSTS = ("stdout", "stderr", "out", "err", "output", "console", "log")
_SECONDS = re.compile(r"^\d+\.\d+$")  # the clock of the kernel
_NAME = re.compile(r"^(?=[\w.-]{1,253}$).{0,253}?(?:\d|[A-Za-z]-[A-Za-z])")
_PATH_NAME = re.compile(r"^(?=[\w./-]{1,253}$).{0,253}?(?:\d|[A-Za-z]-[A-Za-z])")  # pod/container
_JSON_TEXT = ("log", "message", "msg", "MESSAGE", "textPayload", "line", "data",
              "event")  # fmt: skip
_JSON_STACK = (
    "exc_info", "exc_text", "exception", "traceback", "stack_trace", "error.stack_trace", "stack",
    "stack_info",
)  # fmt: skip
_JSON_HOST = ("pod", "pod_name", "host", "hostname", "node", "_HOSTNAME")
# Lines without a label that continue the message above them
_CONTINUATION = re.compile(
    r"nccl\w{1,40}Error: |Last error:|Exception raised from |frame #\d{1,4}: |#\d{1,3} \S+ from /|"
    r"<omitting python frames>|  what\(\):"
)
_CONTINUED = ("Last error:", "Stack trace of the failed collective: ")


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its prefixes.

    Attributes:
        number: Position in the log.
        host: Host name or address by the prefixes; empty when not known.
        rank: Rank by the prefixes.
    """

    number: int
    text: str
    host: str = ""
    rank: int | None = None

    @property
    def is_labeled(self) -> bool:
        return bool(self.host) or self.rank is not None


def strip_prefixes(texts: Sequence[str]) -> list[Line]:
    """Strips all prefixes of the lines of one log, outermost first."""
    lines = _decode_json([Line(number, text) for number, text in enumerate(texts)])
    lines = _blank_other_programs(lines)
    lines = _strip_pdsh(lines)
    for _ in range(MAX_LAYERS):
        lines = [_strip_unambiguous(line) for line in lines]
        layer = _credible_layer(lines)
        if layer is None and any(_BEFORE_RANK.match(line.text) for line in lines):
            layer = _BEFORE_RANK
        if layer is None:
            break
        heads = {match[0].rstrip() for line in lines if (match := layer.match(line.text))}
        lines = [_strip(line, layer, heads) for line in lines]
    return _attribute_continuations(_attribute_rank_heads(lines))


def _strip_pdsh(lines: list[Line]) -> list[Line]:
    """Strips the names of hosts that pdsh reports about, however few lines have them."""
    hosts = {match["host"] for line in lines if (match := _PDSH.match(line.text))}
    stripped = []
    for line in lines:
        host, colon, text = line.text.partition(": ")
        is_labeled = bool(colon) and host in hosts
        stripped.append(replace(line, host=host, text=text) if is_labeled else line)
    return stripped


def _strip_unambiguous(line: Line) -> Line:
    for _ in range(MAX_LAYERS):
        for form in _UNAMBIGUOUS.get(line.text[:1], ()):
            if shorter := _strip_match(line, form):
                line = shorter
                break
        else:
            return line
    return line


def _strip(line: Line, form: re.Pattern[str], heads: Set[str]) -> Line:
    """Strips one layer; a blank line may have lost the space at the end of its prefix."""
    blank = replace(line, text=f"{line.text} ") if line.text in heads else line
    return _strip_match(blank, form) or line


def _strip_match(line: Line, form: re.Pattern[str]) -> Line | None:
    match = form.match(line.text)
    if match is None:
        return None
    host, rank = _identify(match.groupdict()) if form.groups else ("", None)
    return Line(
        line.number,
        line.text[match.end() :],
        host or line.host,
        line.rank if rank is None else rank,
    )


def _identify(groups: Mapping[str, str | None]) -> tuple[str, int | None]:
    """Host and rank of a label."""
    host, rank, label = groups.get("host") or "", groups.get("rank"), groups.get("label")
    if host in _NO_HOSTS:
        host = ""
    if label:
        if label.isdigit():
            return host, int(label[:9])
        word = _RANK_WORD.search(label)
        if word:
            rank = word[1]
        if not host and _NAME.match(label) and not _RANK_WORD.fullmatch(label):
            host = label
    return host, int(rank) if rank else None


def _credible_layer(lines: Sequence[Line]) -> re.Pattern[str] | None:
    """The form of label that most lines have, or most displaced lines of tracebacks."""
    texts = [text for line in lines if (text := line.text).strip()
             and not (text[0] == "[" and is_foreign(text))]  # fmt: skip
    sample = texts[:: len(texts) // MAX_SAMPLE + 1]
    displaced = [text for text in texts if (at := _ANCHOR.search(text)) and at.start() > 0]
    displaced = [text for text in displaced if not text.startswith(("During", "Original"))]
    for form in _AMBIGUOUS:
        matches = [match for text in displaced if (match := form.match(text))]
        is_common = matches and len(matches) >= MIN_LABELED_SHARE * len(displaced)
        if is_common and (len(matches) > 1 or _is_repeated(form, matches[0], texts)):
            return form
        num_labeled = sum(form.match(text) is not None for text in sample)
        if len(texts) < MIN_LABELED_LINES or num_labeled < len(sample) * MIN_LABELED_SHARE / 2:
            continue
        matches = [match for text in texts if (match := form.match(text))]
        share = MIN_LABELED_SHARE if len(texts) > MIN_LABELED_LINES else 1.0
        if len(matches) >= share * len(texts) and _are_labels(matches, len(texts)):
            return form
    return _common_head(displaced)


def _common_head(displaced: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern of what most displaced lines of tracebacks have before their own text."""
    heads = [text[: match.start()] for text in displaced if (match := _ANCHOR.search(text))]
    heads = [head[: mark.start()] if (mark := _RANK_MARK.search(head, 1)) else head
             for head in heads]  # fmt: skip
    heads = [head for head in heads if head.strip() and len(head) <= MAX_HEAD]
    shapes = Counter(_VARYING.sub("#", head) for head in heads)
    shape, count = max(shapes.items(), key=lambda item: item[1], default=("", 0))
    if count < 2 or count < MIN_LABELED_SHARE * len(displaced):
        return None
    first, *others = shape.split("#")
    pattern = re.escape(first)
    for part in others:
        is_rank = _RANK_END.search(first) and "(?P<rank>" not in pattern
        pattern += (r"(?P<rank>\d{1,9})" if is_rank else r"\w{1,64}") + re.escape(part)
        first = part
    return re.compile(pattern)


def _is_repeated(form: re.Pattern[str], match: re.Match[str], texts: Sequence[str]) -> bool:
    """Whether other lines have the same label."""
    same = (other for text in texts if (other := form.match(text)) and other[0] == match[0])
    return len(list(itertools.islice(same, 2))) > 1


def _are_labels(matches: Sequence[re.Match[str]], num_lines: int) -> bool:
    """Whether labels name a few hosts, ranks or levels, and not the words of a text."""
    groups = [match.groupdict() for match in matches]
    if all(group.get("level") for group in groups):
        return len(groups) >= 0.9 * num_lines
    values = {
        group.get("label") or group.get("host") or group.get("rank") or "" for group in groups
    }
    if len(values) > max(2, num_lines // 2):
        return False
    names = [value for value in values if _PATH_NAME.match(value) or _RANK_WORD.search(value)]
    return len(names) == len(values) and not any(map(_SECONDS.match, values))


def _blank_other_programs(lines: list[Line]) -> list[Line]:
    """Empties the lines of a system's journal that programs wrote which are no training job."""
    texts = [line.text for line in lines if line.text]
    if not texts or not _JOURNAL.match(texts[0]):
        return lines
    matches = [match for text in texts if (match := _JOURNAL.match(text))]
    programs = {match["program"] for match in matches}
    if len(matches) < MIN_LABELED_SHARE * len(texts) or not any(map(_DAEMON.match, programs)):
        return lines
    jobs = {match["program"] for match in matches if _JOB_WORD.search(match.string)}
    others = {name for name in programs - jobs if not _JOB_PROGRAM.search(name)}

    def is_of_other(line: Line) -> bool:
        match = _JOURNAL.match(line.text)
        return match is not None and match["program"] in others

    return [replace(line, text="") if is_of_other(line) else line for line in lines]


def _decode_json(lines: list[Line]) -> list[Line]:
    """Takes the messages out of a log whose lines are JSON objects of a collector."""
    candidates = [line for line in lines if line.text.startswith("{") and line.text.endswith("}")]
    if len(candidates) < max(1, MIN_LABELED_SHARE * sum(bool(line.text.strip()) for line in lines)):
        return lines
    decoded = map(_decode_line, lines)
    return [replace(line, text=text) for line in decoded for text in line.text.split("\n")]


def _decode_line(line: Line) -> Line:
    try:
        record = json.loads(line.text)
    except (ValueError, RecursionError):
        return line
    if not isinstance(record, dict):
        return line
    text = next((record[key] for key in _JSON_TEXT if isinstance(record.get(key), str)), None)
    if text is None:
        return line
    host = next((record[key] for key in _JSON_HOST if isinstance(record.get(key), str)), "")
    error = record.get("error")
    stacks = {**record, **(error if isinstance(error, dict) else {})}
    parts = [text, *(stacks[key] for key in _JSON_STACK if isinstance(stacks.get(key), str))]
    return replace(line, text="\n".join(part.rstrip("\n") for part in parts), host=host[:255])


def _attribute_rank_heads(lines: list[Line]) -> list[Line]:
    """Gives lines their rank if most lines of the script begin with it, as in ``rank 3 step 5``."""
    heads = {line.number: int(match["rank"]) for line in lines
             if line.rank is None and (match := _RANK_HEAD.match(line.text))}  # fmt: skip
    num_lines = sum(line.rank is None and bool(line.text.strip()) for line in lines)
    if len(set(heads.values())) < 2 or len(heads) < MIN_LABELED_SHARE * num_lines:
        return lines
    return [replace(line, rank=heads.get(line.number, line.rank)) for line in lines]


def _attribute_continuations(lines: list[Line]) -> list[Line]:
    """Gives lines without a label that continue a labeled message its host and rank."""
    result: list[Line] = []
    for line in lines:
        previous = result[-1] if result else None
        if (
            previous is not None
            and previous.is_labeled
            and not line.is_labeled
            and (_CONTINUATION.match(line.text) or previous.text.endswith(_CONTINUED))
        ):
            line = replace(line, host=previous.host, rank=previous.rank)
        result.append(line)
    return result
