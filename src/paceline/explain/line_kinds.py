"""Classifies single lines that belong to no larger message. Pure."""

from __future__ import annotations

import re

from paceline.explain.units import Kind

SYSTEM_DAEMONS = (
    "sshd|systemd|CRON|cron|dbus|sudo|su|snapd|NetworkManager|dockerd|containerd|kubelet|audit"
    "|rsyslogd|polkitd|postfix|chronyd|ntpd|dhclient"
)
MAX_CHARS = 400  # of a line that are looked at
_LEVEL = re.compile(
    r"(?:\[?[\w.-]{0,40}[\[:( -]{0,3})?"
    r"\b(?P<level>DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b"
    r"|\[(?P<letter>[DIWEC]) \d{4}-"
)
_WARNING = re.compile(
    r"(?:\S{1,300}:\d{1,6}: )?(?:[A-Z]\w{0,60})?Warning: |(?:WARNING|WARN|warning|Warning)\b[: ]"
    r"|\[WARN"
)
_PROGRESS = re.compile(
    r"(?i:\b(?:epoch|steps?|iter(?:ation)?|batch|global_step|trial|round|fold|episode)\b"
    r"\W{0,4}\d)|\b(?:\d{1,3})%\|"
    r"|\d ?(?:it|s|samples|tokens|steps?)/(?:s|it|step)\b|['\"\b]?loss['\"]?[ =:]{1,3}-?\d"
    r"|(?i:\b(?:acc|accuracy|top-?[15]|f1|bleu|ppl|perplexity|auc)\b[ =:@]{1,3}\d)"
    r"|\bTotal optimization steps|\bresum(?:ing|ed) (?:at|from)|\bloss=\d"
)
_DIGIT = re.compile(r"\d")
_PROGRESS_WORDS = (
    "epoch", "step", "iter", "batch", "%|", "it/", "/it", "s/", "/s", "loss", "acc", "top", "f1",
    "bleu", "ppl", "perplexity", "auc", "resum", "trial", "round", "fold", "episode",
)  # fmt: skip
_FINISH = re.compile(
    r"(?i:^\W{0,4}(?:all )?(?:done|finished|completed|success(?:ful(?:ly)?)?)\b"
    r"|\b(?:training|run|job|everything|test|evaluation|fit|script|program)\b.{0,30}"
    r"\b(?:done|finished|complete[d]?|ended (?:well|normally))\b"
    r"|\bsav(?:ed|ing) .{0,80}(?:model|checkpoint|\.pt\b|\.safetensors|weights)"
    r"|\b(?:finished|completed) (?:successfully|training|in |with(?:out| no| 0) error)"
    r"|`Trainer\.fit` stopped|\bApplication shutdown complete"
    r"|\bexit(?:ed)? (?:status|code|with code):? 0\b|\btrain_runtime\b|\bsucceeded\b)"
)
_SOME_FAILED = re.compile(r"\b[1-9]\d{0,8} (?:\w{1,40} )?failed\b")
_FINISH_WORDS = (
    "done", "finished", "complete", "succe", "sav", "ended", "stopped", "code", "runtime",
)  # fmt: skip
_NAN_LOSS = re.compile(
    r"(?i:\b(?P<name>train_|val_|eval_)?loss\b['\"]?\s{0,20}(?:[:=]|is|became)?\s{0,20}(?:nan|-?inf)\b)"
)
_EVALUATION = re.compile(  # before "loss"
    r"(?i:(?:^|[\W_])(?:val|valid|validation|eval|evaluation|test|dev)[\W_]{1,3}(?:mean[\W_]|avg[\W_])?$)"
)
_WORD = re.compile(r"[a-z]+")
_ERROR_WORDS = {
    "abort", "aborted", "aborting", "cancelled", "cannot", "corrupt", "corrupted", "damaged",
    "dead", "denied", "errno", "error", "errors", "evicted", "exceeded", "exceeds", "exhausted",
    "expired", "fail",
    "failed", "fails", "failure", "failures", "fatal", "incompatible", "insufficient",
    "invalid", "killed", "lost", "mismatch", "mismatched", "oom", "refused", "refuses", "retry",
    "timeout", "unable", "unavailable", "undefined", "unexpected", "unknown", "unreachable",
    "unrecognized", "unsupported", "violated", "violation",
}  # fmt: skip
_ERROR_PHRASES = {  # by the rarest word of each
    "can": "can't", "could": "could not", "found": "not found", "such": "no such",
    "module": "no module", "timed": "timed out", "enough": "not enough", "long": "too long",
    "many": "too many", "closed": "closed by", "reset": "reset by", "route": "no route",
    "available": "not available", "space": "no space", "memory": "out of memory",
    "shell": "is your shell clean", "clients": "waiting for clients",
    "compatible": "not compatible", "changed": "has changed", "components": "no components",
    "termination": "bad termination", "required": "required but", "permitted": "not permitted",
    "resource": "low on resource", "nodes": "nodes are available", "oom": "oom_kill",
    "kill": "oom-kill", "interruption": "spot instance interruption", "preempted": "preempted",
}  # fmt: skip
# A program that continues without what it lacks, such as one that only describes the machine
_GOES_ON = re.compile(
    r"\b(?:fall(?:ing|s)? back|skipp(?:ed|ing)|ignor(?:ed|ing)|continuing)\b|, using "
    r"|\b(?:nvidia-smi|rocm-smi|lspci|ibstat|ibv_devinfo): (?:command )?not found"
)
_GOES_ON_WORDS = ("fall", "skipp", "ignor", "continuing", ", using ", "not found")
_LAUNCHER = re.compile(
    r"(?:slurmstepd(?:-[\w.-]{1,253})?|srun|sbatch|salloc|(?:mpirun|mpiexec)(?:\.openmpi)?|prterun"
    r"|orterun|orted|prted): "
    r"|\s{0,9}(?:Warning|Normal) {2,9}\w{2,40} {2}"  # events of Kubernetes
    r"|(?:docker: )?Error response from daemon: (?:could not select device driver|failed to create "
    r"|OCI runtime|pull access denied|manifest )"
    r"|\[(?:mpiexec|proxy|prterun|mpirun)[@:][^\]]{1,300}\] "
    r"|(?:\[INFO\] )?\[launch\.py:\d{1,6}:sigkill_handler\] "  # of DeepSpeed
)
# A row of data, or a quoted text with what a program found about it
_DATA = re.compile(
    r'\[?\{?"[^"]{1,300}"\s{0,3}(?:->|=>|[,:|;\t])|\w{1,20}[:=] ?"[^"]{1,300}"\s{0,3}(?:->|=>|\t)'
)
# How other kinds of programs write: none of their lines is a failure of a training job
_FOREIGN = re.compile(
    "|".join(
        (
            r'\S{1,60} - \S{1,60} \[.{10,40}\] "[A-Z]{3,8} ',  # access log of a web server
            r"\[\w{1,10}\] \d{1,9}#\d{1,9}: ",  # nginx
            r"\[[A-Z][a-z]{2} [A-Z][a-z]{2} \d\d [\d:.]{8,20} \d{4}\] ",  # Apache
            r"(?:[A-Z]{3,5} )?\[\d{1,9}\] (?:LOG|FATAL|ERROR|DETAIL|STATEMENT|HINT|PANIC|CONTEXT"
            r"|NOTICE|WARNING): {2}",  # PostgreSQL
            rf"[A-Z][a-z]{{2}} [ \d]\d [\d:]{{8}} \S{{1,253}} (?:{SYSTEM_DAEMONS})\b",
            r"systemd\[\d{1,9}\]: |haproxy\[|mysqld|redis|nginx|named\[",
            r"\[[\w .#-]{1,60}/(?:INFO|WARN|ERROR|FATAL)\]",  # games in Java
            r'Exception in thread "|(?:Caused by: )?(?:java|javax|io|org|com|scala|kotlin)'
            r"\.[\w.$]{3,200}:",
            r"g?make(?:\[\d{1,3}\])?: |CMake |ninja: |error\[E\d{4}\]|npm (?:ERR!|error)",
            r"\S{1,200}\.(?:c|cc|cpp|cxx|h|hpp|cu|java|rs|go|js|ts|tex|tf):\d{1,6}(?::\d{1,6})?: "
            r"(?:fatal )?(?:error|warning|note)",  # compilers
            r"goroutine \d|panic: |thread '.{1,60}' panicked",
            r"E: |\(error\) |ERROR: {1,2}(?!Unexpected)|fatal: |curl: |rsync error|docker: ",
            r"Error response from daemon",
            r" {1,6}\d{0,6} {1,2}\| ",  # code that a compiler quotes
            r"\[\S{1,200} (?:\(root-commit\) )?[0-9a-f]{7,40}\] ",  # git
            r"[IWEF]\d{4} [\d:.]{8,20} {1,9}\d{1,9} \S{1,200}\.go:\d{1,6}\] ",  # Kubernetes
        )
    )
)
_ANSWERED = re.compile(  # a request to a server in Python
    r'(?:INFO: {2,9})?\S{1,60} - "[A-Z]{3,8} \S{1,300} HTTP/[\d.]{1,3}" (?P<status>\d)\d\d\b'
)
_FOREIGN_FRAME = re.compile(
    r"\s{1,8}at \S{1,200} ?(?:\(|\[as )|\s{1,8}at \S{1,300}:\d{1,6}:\d{1,6}$"
)


def classify(line: str) -> tuple[Kind, str]:
    """Kind and level of a line: ``error``, ``warning``, ``info``, or empty for plain text."""
    short = line[:MAX_CHARS]
    lowered = short.lower()
    if _LAUNCHER.match(short):
        return "library", "error" if _states_error(lowered) else "info"
    if "loss" in lowered and ("nan" in lowered or "inf" in lowered):
        heads = [short[: match.start()] + (match["name"] or "") for match in
                 _NAN_LOSS.finditer(short)]  # fmt: skip
        if heads:  # an evaluation without a result stops no training
            is_evaluation = all(map(_EVALUATION.search, heads))
            return ("progress", "") if is_evaluation else ("numeric", "error")
    if is_foreign(short):
        return "foreign", ""
    if " HTTP/" in short and (answer := _ANSWERED.match(short)):
        return ("progress" if answer["status"] in "23" else "foreign"), ""
    if '"' in short and _DATA.match(short):
        return "foreign", ""
    level = level_of(short)
    if _WARNING.match(short) or level.startswith("W"):
        return "warning", "warning"
    is_wandb = short.startswith("wandb: ")  # it sums up a run that crashed, too
    if not is_wandb and _shows_end(short, lowered):
        return "finish", ""
    if not is_wandb and _shows_progress(short, lowered):
        return "progress", ""
    if level[:1] not in ("I", "D") and _states_error(lowered) and not _goes_on(lowered):
        return "text", "error"
    return "text", "info" if is_wandb else ""


def _states_error(lowered: str) -> bool:
    """Whether a line has words of an error."""
    words = set(_WORD.findall(lowered))
    if not _ERROR_WORDS.isdisjoint(words):
        return True
    return any(_ERROR_PHRASES[word] in lowered for word in _ERROR_PHRASES.keys() & words)


def _goes_on(lowered: str) -> bool:
    return any(map(lowered.__contains__, _GOES_ON_WORDS)) and _GOES_ON.search(lowered) is not None


def _shows_end(line: str, lowered: str) -> bool:
    if not any(map(lowered.__contains__, _FINISH_WORDS)):
        return False
    if "abort" in lowered or _SOME_FAILED.search(lowered):
        return False
    return _FINISH.search(line) is not None


def _shows_progress(line: str, lowered: str) -> bool:
    if not (_DIGIT.search(line) or "resum" in lowered or "optimization" in lowered):
        return False
    return any(map(lowered.__contains__, _PROGRESS_WORDS)) and _PROGRESS.search(line) is not None


def level_of(line: str) -> str:
    """The level that a logger wrote at the beginning of a line, such as ``ERROR`` or ``E``."""
    match = _LEVEL.match(line[:80])
    return (match["level"] or match["letter"]) if match else ""


def is_foreign(line: str) -> bool:
    """Whether a line has the form of a program that is no training job."""
    return _FOREIGN.match(line[:MAX_CHARS]) is not None


def is_foreign_frame(line: str) -> bool:
    """Whether a line is a frame of a stack of Java or JavaScript."""
    return _FOREIGN_FRAME.match(line[:MAX_CHARS]) is not None
