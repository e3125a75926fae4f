"""Renders the live screen from a :class:`~paceline.launch.terminal.run_state.RunState`. Pure.

From top to bottom: progress, a line per rank, a line per host, curves, news, the latest lines of
the log, and the keys. Ranks that do not fit share one line; those that fail, hang or are slow come
first.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from paceline.launch.terminal.run_state import TRAINING, HostState, RankState, RunState
from paceline.launch.terminal.script_progress import ScriptProgress
from paceline.rundir.records import as_float, as_int
from paceline.spec.events import PART_NAMES
from paceline.spec.formatting import format_bit_rate, format_epoch, format_time, pluralize
from paceline.spec.terminal import fixed_width, wrap

WIDE_COLUMNS = 116  # from which a host's load is beside its ranks
QUIET_S = 5.0  # without a report: ranks send one each second
MIN_LOG_LINES = 4
MAX_ROWS_PER_LINE = 4
LOG_SCALE_RATIO = 20.0  # of the highest to the lowest value, from which a curve is logarithmic
MAX_BAR_WIDTH = 40
MIN_CURVE_WIDTH = 12


@dataclass(frozen=True, slots=True)
class SymbolSet:
    """The characters of the live screen.

    Attributes:
        parts: One for each part of a step, by name.
        curve: From low to high.
        full, empty: Of the progress bar.
        rule, separator, marker, ellipsis: Of headings, between words, of the selected rank, of
            truncated text.
    """

    parts: Mapping[str, str]
    curve: str
    full: str
    empty: str
    rule: str
    separator: str
    marker: str
    ellipsis: str


UNICODE = SymbolSet(
    {"computing": "█", "data": "▒", "waiting": "·", "moving": "═", "saving": "+", "other": "-"},
    "▁▂▃▄▅▆▇█", "━", "─", "─", "·", "▸", "…",
)  # fmt: skip
ASCII = SymbolSet(
    {"computing": "#", "data": "d", "waiting": ".", "moving": "=", "saving": "+", "other": "-"},
    "_.-=*#", "#", ".", "-", "|", ">", "~",
)  # fmt: skip
_COLOURS = {"computing": "green", "data": "yellow", "waiting": "bright_black", "moving": "cyan",
            "saving": "blue", "other": "magenta"}  # fmt: skip
_ALERT, _DIM, _TITLE = "bold red", "bright_black", "bold"


@dataclass(frozen=True, slots=True)
class View:
    """What the live screen shows besides the run's state.

    Attributes:
        seconds: Time since it began.
        now: Time of the state's clock.
        remaining_s: Estimated time until the end; ``None`` if unknown.
        selected: The rank whose log is shown; ``None`` for all.
        log: The latest lines; may contain colours.
        page: Shown instead of the log unless empty.
        keys: The last line.
        notice: Shown instead of the keys unless empty.
        script: The script's own progress bar, shown if no rank reports steps.
    """

    title: str = ""
    seconds: float = 0.0
    now: float = 0.0
    remaining_s: float | None = None
    selected: int | None = None
    log: Sequence[str] = ()
    log_title: str = "log"
    page: Sequence[str] = ()
    keys: str = ""
    notice: str = ""
    script: ScriptProgress | None = None


def frame(state: RunState, view: View, columns: int, lines: int,
          symbols: SymbolSet = UNICODE) -> list[Text]:  # fmt: skip
    """Renders the screen: exactly ``lines`` lines of at most ``columns`` columns."""
    drawing = _Frame(state, view, columns, symbols)
    head, available = drawing.head(), lines
    available -= len(head) + 1  # for the keys
    has_side_load = columns >= WIDE_COLUMNS
    hosts = [] if has_side_load else drawing.hosts(max(2, lines // 5))
    news = drawing.news(5 if lines >= 36 else 3)
    curves = drawing.curves(1 if lines < 36 else 2, 1 if lines < 44 else 2)
    available -= len(hosts) + len(news) + len(curves)
    ranks = drawing.ranks(max(4, available - 1 - MIN_LOG_LINES), has_side_load)
    body = [*head, *ranks, *hosts, *curves, *news]
    body = body[: max(1, lines - 2)]
    log = drawing.log(max(0, lines - len(body) - 1))
    screen = [*body, *log][: lines - 1]
    screen += [Text()] * (lines - 1 - len(screen))
    screen.append(drawing.foot())
    for line in screen:
        line.plain = fixed_width(line.plain)  # hosts and scripts may send wide characters
        line.no_wrap, line.overflow = True, "crop"
        line.truncate(columns)
    return screen


class _Frame:
    """Renders the parts of one frame."""

    def __init__(self, state: RunState, view: View, columns: int, symbols: SymbolSet) -> None:
        self._state, self._view, self._columns, self._symbols = state, view, columns, symbols
        self._severities = severities(state, view.now)
        self._is_reporting = any(rank.reported_at is not None for rank in state.ranks.values())

    # --- progress ----------------------------------------------------------------------------

    def head(self) -> list[Text]:
        state, view = self._state, self._view
        hosts = len({rank.host for rank in state.ranks.values()})
        num_alive = sum(rank.state not in ("failed", "lost") for rank in state.ranks.values())
        alive = f"{num_alive} of " if num_alive < len(state.ranks) else ""
        size = f"{alive}{pluralize(len(state.ranks), 'rank')} on {pluralize(hosts, 'host')}"
        separator, elapsed = self._symbols.separator, f"{format_clock(view.seconds)} "
        attempt = f" {separator} start {state.attempt + 1}" if state.attempt else ""
        details = f" {separator} {size}{attempt}"
        width = self._columns - len(details) - len(elapsed) - 2
        run = abbreviate(view.title, width, self._symbols.ellipsis)
        title = self._justified(f" {run}{details}", elapsed, _TITLE)
        progress = self._progress()
        return [title, progress] if progress is not None else [title]

    def _progress(self) -> Text | None:
        """Renders the training's progress; ``None`` if no rank reports it."""
        progress = self._state.progress
        step, steps = as_int(progress.get("step")), as_int(progress.get("steps"))
        if step is None:
            script = self._view.script
            return None if script is None else self._script_progress(script)
        parts = []
        if (epoch := as_int(progress.get("epoch"))) is not None:
            parts.append(format_epoch(epoch, as_int(progress.get("epochs"))))
        parts.append(f"step {step:,}" + (f"/{steps:,}" if steps else ""))
        # the sum over the ranks if all report a rate, else that of the last record
        rates = [rank.samples_per_s for rank in self._state.ranks.values() if rank.state == "ok"]
        known_rates = [rate for rate in rates if rate is not None]
        last_rate = progress.get("samples_per_s")
        rate = None if last_rate is None else as_float(last_rate)
        if known_rates and len(known_rates) == len(rates):
            rate = sum(known_rates)
        if rate is not None:
            parts.append(f"{format_rate(rate)} samples/s")
        if self._state.saved_step is not None:
            parts.append(f"saved at {self._state.saved_step:,}")
        percentage = f"{step / steps:.0%}" if steps else ""
        remaining_s = self._view.remaining_s
        remaining = "" if remaining_s is None else f"{format_clock(remaining_s)} left"
        right = "  ".join(part for part in (percentage, remaining) if part)
        return self._progress_line(parts, right, step, steps)

    def _script_progress(self, script: ScriptProgress) -> Text:
        """Renders the script's own progress bar."""
        title = [abbreviate(script.title, 24, self._symbols.ellipsis)] if script.title else []
        parts = [*title, f"step {script.step:,}/{script.steps:,}", script.rate]
        parts += [script.more] if script.more else []
        share = f"{script.step / script.steps:.0%}" if script.steps else ""
        right = "  ".join(part for part in (share, f"{script.left} left") if part)
        return self._progress_line(parts, right, script.step, script.steps)

    def _progress_line(self, parts: list[str], right: str, step: int, steps: int | None) -> Text:
        """Renders texts, a bar and further text, without the last texts if the line is short."""
        symbols = self._symbols
        while len(parts) > 1 and len("  ".join([*parts, right])) + 1 > self._columns:
            parts.pop()
        line = Text(" " + "  ".join(parts))
        width = self._columns - line.cell_len - len(right) - 4
        if steps and width >= 8:
            filled = round(min(1.0, step / steps) * width)
            line.append("  ").append(symbols.full * filled, "green")
            line.append(symbols.empty * (width - filled), _DIM).append(f" {right}")
        elif right:
            line.append(f"  {right}")
        return line

    # --- ranks -------------------------------------------------------------------------------

    def ranks(self, max_lines: int, has_side_load: bool) -> list[Text]:
        """Renders a line for each of the most important ranks, and one for the others."""
        state = self._state
        visible, hidden = select_ranks(state, self._view, max_lines - 1)
        has_steps = any(rank.step is not None for rank in state.ranks.values())
        has_rates = any(rank.samples_per_s is not None for rank in state.ranks.values())
        has_parts = any(rank.parts for rank in state.ranks.values())
        host_width = min(16, max([4, *(len(rank.host) for rank in visible)]))
        has_loads = has_side_load and any(map(_has_load, state.hosts.values()))
        load = 12 + self._gpu_width + 26 if has_loads else 0
        head = Text("  rank ", _DIM).append("host".ljust(host_width)).append("  phase     ")
        used_columns = 7 + host_width + 12
        if has_steps:
            head.append("     step")
            used_columns += 9
        if has_rates:
            head.append("  samples/s")
            used_columns += 11
        width = min(MAX_BAR_WIDTH, self._columns - used_columns - 2 - load - 1) if has_parts else 0
        if width >= 8:
            head.append("  time of a step")
        if has_loads:
            head = self._padded(head, self._columns - load)
            head.append(self._load_head())
        lines, previous_host = [head], ""
        for rank in visible:
            line = self._rank_row(rank, host_width, has_steps, has_rates, width)
            if has_loads and rank.host != previous_host and (host := state.hosts.get(rank.host)):
                line = self._padded(line, self._columns - load).append_text(self._load(host))
            previous_host = rank.host
            lines.append(line)
        if hidden:
            lines.append(self._summary_row(hidden))
        if width >= 8:
            running = [rank for rank in visible if rank.state == "ok" and rank.parts]
            lines += self._legend(running, width)
        return lines

    def _rank_row(self, rank: RankState, host_width: int, has_steps: bool, has_rates: bool,
                  bar_width: int) -> Text:  # fmt: skip
        symbols = self._symbols
        style = _ALERT if self._severities[rank.rank] else ""
        is_selected = rank.rank == self._view.selected
        sign = "!" if style else " "
        line = Text(symbols.marker if is_selected else " ").append(sign, style)
        host = abbreviate(rank.host, host_width, symbols.ellipsis, host=True)
        line.append(f"{rank.rank:>4} {host.ljust(host_width)}  ")
        line.append(truncate(self._phase(rank), 10, symbols.ellipsis).ljust(10), style)
        if has_steps:
            line.append(f"{'' if rank.step is None else f'{rank.step:,}':>9}")
        ok = rank.state == "ok"
        if has_rates:
            rate = rank.samples_per_s if ok else None
            line.append(f"{'' if rate is None else format_rate(rate):>11}")
        if bar_width >= 8 and ok and rank.parts:
            line.append("  ").append_text(self.bar(rank.parts, bar_width))
        elif not ok and rank.problem:
            line.append(f"  {rank.problem}", _ALERT)
        if is_selected:
            line.stylize("bold")
        return line

    def _phase(self, rank: RankState) -> str:
        """Returns what a rank does, or what is wrong with it."""
        if rank.state != "ok":
            return rank.state
        straggler, report_age_s = self._state.straggler, rank.report_age_s(self._view.now)
        if report_age_s is not None and report_age_s >= QUIET_S and rank.phase == TRAINING:
            return f"quiet {report_age_s:.0f} s"
        if straggler is not None and straggler.rank == rank.rank and rank.phase == TRAINING:
            return f"slow {straggler.part:.0%}"
        if rank.reported_at is None and self._is_reporting:
            return "starting"  # the other ranks send reports: it will, too
        return rank.phase

    def bar(self, parts: Mapping[str, float], width: int) -> Text:
        """Renders the time of a step as a bar."""
        bar = Text()
        for name, count in cell_counts(ordered_parts(parts), width):
            bar.append(self._symbols.parts[name] * count, _COLOURS[name])
        return bar

    def _legend(self, ranks: Sequence[RankState], width: int) -> list[Text]:
        """Renders the legend of these ranks' bars."""
        bars = [cell_counts(ordered_parts(rank.parts), width) for rank in ranks]
        used = {name for bar in bars for name, count in bar if count}
        lines = [Text(" ")]
        for name, sign in self._symbols.parts.items():
            if name in used:
                if lines[-1].cell_len + 4 + len(PART_NAMES[name]) > self._columns:
                    lines.append(Text(" "))
                lines[-1].append(" ").append(sign * 2, _COLOURS[name])
                lines[-1].append(f" {PART_NAMES[name]}")
        return lines if used else []

    def _summary_row(self, ranks: Sequence[RankState]) -> Text:
        hosts = len({rank.host for rank in ranks})
        steps = [rank.step for rank in ranks if rank.step is not None]
        text = f"       {pluralize(len(ranks), 'more rank')} on {pluralize(hosts, 'host')}"
        phases = Counter(self._phase(rank) for rank in ranks)
        counts = [name if len(phases) == 1 else f"{count} {name}"
                for name, count in phases.most_common(3)]  # fmt: skip
        text += f": {', '.join(counts)}"
        if steps:
            lowest, highest = min(steps), max(steps)
            text += f", step {lowest:,}" + (f" to {highest:,}" if highest > lowest else "")
        divided = [rank.parts for rank in ranks if rank.parts]
        if divided:
            share = sum(parts.get("computing", 0.0) for parts in divided) / len(divided)
            text += f", computing {share:.0%}"
        return Text(text, _DIM)

    # --- hosts -------------------------------------------------------------------------------

    def hosts(self, max_lines: int) -> list[Text]:
        """Renders a line for each host; of many, for lost and busy ones."""
        ranks = sorted(self._state.ranks.values(), key=lambda rank: -rank.rank)
        first_rank = {rank.host: rank.rank for rank in ranks}  # of each host
        hosts = [h for h in self._state.hosts.values() if _has_load(h) or h.state == "lost"]
        hosts.sort(key=lambda host: first_rank.get(host.name, len(ranks)))
        if not hosts:
            return []
        visible, hidden = hosts, []
        if len(hosts) > max_lines - 1:
            order = sorted(hosts, key=lambda host: (host.state == "ok", -(host.cpu or 0.0)))
            visible, hidden = order[: max(1, max_lines - 2)], order[max(1, max_lines - 2) :]
        name_width = min(20, max([4, *(len(host.name) for host in visible)]))
        lines = [Text("  host ".ljust(4 + name_width), _DIM).append(self._load_head())]
        for host in visible:
            name = abbreviate(host.name, name_width, self._symbols.ellipsis, host=True)
            line = Text(f"  {name.ljust(name_width)}  ").append_text(self._load(host))
            lines.append(line)
        if hidden:
            cpus = [host.cpu for host in hidden if host.cpu is not None]
            average = f", cpu {sum(cpus) / len(cpus):.0%} on average" if cpus else ""
            lines.append(Text(f"  {pluralize(len(hidden), 'more host')}{average}", _DIM))
        return lines

    @property
    def _gpu_width(self) -> int:
        """Width of the column of GPUs."""
        num_gpus = max((len(host.gpus) for host in self._state.hosts.values()), default=0)
        return 0 if not num_gpus else min(5 * num_gpus, 20) + 1

    def _load_head(self) -> str:
        gpus = "gpu".rjust(self._gpu_width) if self._gpu_width else ""
        return f"   cpu   mem{gpus}{'in':>13}{'out':>13}"

    def _load(self, host: HostState) -> Text:
        if host.state == "lost":
            return Text(f"  {host.problem or 'lost'}", _ALERT)
        line = Text()
        for used in (host.cpu, host.memory):
            style = "yellow" if used is not None and used > 0.95 else ""
            line.append(f"{'' if used is None else f'{used:.0%}':>6}", style)
        if self._gpu_width:
            usage = " ".join(f"{share:.0%}" for share in host.gpus)
            if len(usage) >= self._gpu_width:  # too many: the lowest and the highest
                usage = f"{min(host.gpus):.0%}-{max(host.gpus):.0%}"
            line.append(usage.rjust(self._gpu_width))
        for rate in (host.in_bps, host.out_bps):
            line.append(f"{'' if rate is None else format_bit_rate(rate):>13}")
        return line

    # --- curves, news, the log ---------------------------------------------------------------

    def curves(self, rows: int, height: int) -> list[Text]:
        """Renders curves of training and evaluations, two or three per row."""
        state = self._state
        titles = sorted(state.curves, key=lambda title: (title.split()[0] != "train",
                                                        "loss" not in title))  # fmt: skip
        titles = [name for name in titles if state.curves[name].points]
        per_row = 2 if self._columns < 110 else 3
        titles = titles[: per_row * rows]
        lines: list[Text] = []
        for first in range(0, len(titles), per_row):
            lines += self._curve_row(titles[first : first + per_row], per_row, height)
        return lines

    def _curve_row(self, titles: Sequence[str], per_row: int, height: int) -> list[Text]:
        width = (self._columns - 2) // per_row
        lines = [Text("  ") for _ in range(height)]
        for title in titles:
            value = self._state.latest_values[title]
            figure = f" {value:.4g} "
            label_width = width - len(figure) - MIN_CURVE_WIDTH
            label = abbreviate(title, label_width, self._symbols.ellipsis) + figure
            curve_width = min(48, width - len(label) - 2)
            drawn = draw_curve(self._state.curves[title].values, curve_width, height, self._symbols)
            for index, row in enumerate(drawn):
                part = Text(label if index == height - 1 else " " * len(label)).append(row, "cyan")
                lines[index].append_text(self._padded(part, width))
        return lines

    def news(self, max_lines: int) -> list[Text]:
        """Renders the latest news in at most ``max_lines`` lines."""
        news = self._state.news
        items = [(item.is_bad, f"{format_time(item.time)}  {item.text}") for item in news]
        if self._state.hang:
            items.append((True, f"hangs: {self._state.hang}"))
        if self._state.waiting:
            items.append((True, f"waits for nodes: {self._state.waiting.description}"))
        lines: list[Text] = []
        for is_bad, text in reversed(items[-max_lines:]):
            parts = textwrap.wrap(text, self._columns - 3)[:2]
            if len(lines) + len(parts) > max_lines and lines:
                break
            continuation = [Text(f"  {part}", _ALERT if is_bad else "") for part in parts[1:]]
            sign = "! " if is_bad else "  "
            lines = [Text(f"{sign}{parts[0]}", _ALERT if is_bad else ""), *continuation, *lines]
        return lines

    def log(self, max_lines: int) -> list[Text]:
        """Renders the log: its title and the latest lines."""
        if max_lines <= 0:
            return []
        view, dash = self._view, self._symbols.rule
        title = f"{dash * 2} {view.log_title} "
        rule = Text(title + dash * max(0, self._columns - len(title)), _DIM)
        if view.page:
            return [rule, *(Text(self._keep_end(line)) for line in view.page[: max_lines - 1])]
        lines: list[Text] = []
        for line in reversed(view.log):
            if len(lines) >= max_lines - 1:
                break
            lines = [*self._wrap_line(line), *lines]
        return [rule, *lines[max(0, len(lines) - max_lines + 1) :]]

    def _keep_end(self, line: str) -> str:
        """Truncates a line at its beginning: the end says most, as of a path."""
        width, indent = self._columns, len(line) - len(line.lstrip())
        if len(line) <= width:
            return line
        return line[:indent] + self._symbols.ellipsis + line[len(line) - width + indent + 1 :]

    def _wrap_line(self, line: str) -> list[Text]:
        """Wraps a line of the log; a very long one is cut off."""
        if "\x1b" not in line:
            rows = wrap(line[: MAX_ROWS_PER_LINE * self._columns], self._columns).split("\n")
            return [Text(row) for row in rows[:MAX_ROWS_PER_LINE]]
        text = Text.from_ansi(line)
        at, breaks = 0, list[int]()
        while len(text) - at > self._columns and len(breaks) < MAX_ROWS_PER_LINE:
            space = text.plain.rfind(" ", at + 1, at + self._columns)
            at = space + 1 if space > at else at + self._columns
            breaks.append(at)
        return list(text.divide(breaks))[:MAX_ROWS_PER_LINE]

    def foot(self) -> Text:
        view = self._view
        if view.notice:
            return Text(f" {view.notice}", "reverse")
        keys = view.keys.split("  ")
        while len(keys) > 2 and len("  ".join(keys)) + 1 > self._columns:
            keys.pop(-2)  # keep the last, for help
        return Text(f" {'  '.join(keys)}", _DIM)

    # --- lines -------------------------------------------------------------------------------

    def _justified(self, left_text: str, right_text: str, style: str) -> Text:
        width = self._columns - len(right_text) - 1
        left_text = truncate(left_text, width, self._symbols.ellipsis)
        return Text(left_text.ljust(width) + " " + right_text, style)

    @staticmethod
    def _padded(line: Text, width: int) -> Text:
        line.truncate(max(0, width))
        line.pad_right(max(0, width - line.cell_len))
        return line


# --- selection --------------------------------------------------------------------------------

STRAGGLING, QUIET, FROZEN, LOST = 1, 2, 3, 4


def severities(state: RunState, now: float) -> dict[int, int]:
    """Returns how much each rank needs attention; 0 for not at all."""
    report_ages = {rank: rank_state.report_age_s(now)
                   for rank, rank_state in state.ranks.items()
                   if rank_state.state == "ok"}  # fmt: skip
    min_age_s = min((age_s for age_s in report_ages.values() if age_s is not None), default=0.0)
    straggler = state.straggler.rank if state.straggler is not None else None
    severity = {}
    for rank, rank_state in state.ranks.items():
        age_s = report_ages.get(rank)
        if rank_state.state in ("failed", "lost"):
            severity[rank] = LOST
        elif rank_state.state in ("frozen", "late"):
            severity[rank] = FROZEN
        elif age_s is not None and age_s >= QUIET_S + 2 * min_age_s:
            severity[rank] = QUIET
        else:
            severity[rank] = STRAGGLING if rank == straggler and rank_state.state == "ok" else 0
    return severity


def select_ranks(state: RunState, view: View,
                 max_lines: int) -> tuple[list[RankState], list[RankState]]:  # fmt: skip
    """Returns the ranks that get a line of their own, and those that share one.

    Ranks that fail, hang or are slow come first, then those that wait least: they are the slowest.
    """
    ranks = [state.ranks[rank] for rank in sorted(state.ranks)]
    if len(ranks) <= max_lines - 1:
        return ranks, []
    severity = severities(state, view.now)
    seen: set[tuple[str, int]] = set()  # hosts with a rank in that state
    represented = set()
    for rank in ranks:
        if severity[rank.rank] and (rank.host, severity[rank.rank]) in seen:
            represented.add(rank.rank)
        seen.add((rank.host, severity[rank.rank]))

    def order(rank: RankState) -> tuple[bool, bool, int, bool, float, int]:
        waiting = rank.parts.get("waiting", 1.0)
        is_training = rank.phase == TRAINING and rank.state == "ok"
        return (rank.rank != view.selected, rank.rank in represented, -severity[rank.rank],
                is_training, waiting, rank.rank)  # fmt: skip

    first = {rank.rank for rank in sorted(ranks, key=order)[: max(1, max_lines - 2)]}
    return ([rank for rank in ranks if rank.rank in first],
            [rank for rank in ranks if rank.rank not in first])  # fmt: skip


# --- drawing ----------------------------------------------------------------------------------


def ordered_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """Returns the parts of a step in drawing order; the unreported rest is ``other``."""
    named = {name: parts.get(name, 0.0) for name in UNICODE.parts if name != "other"}
    return {**named, "other": max(0.0, 1 - sum(named.values()))}


def describe_parts(parts: Mapping[str, float]) -> str:
    """Formats the largest parts: ``71% computing, 20% waiting for slower ranks``."""
    shares = sorted(ordered_parts(parts).items(), key=lambda item: -item[1])
    return ", ".join(f"{part:.0%} {PART_NAMES[name]}" for name, part in shares if part >= 0.005)


def cell_counts(parts: Mapping[str, float], width: int) -> list[tuple[str, int]]:
    """Distributes exactly ``width`` cells to the parts by their shares."""
    total = sum(parts.values()) or 1.0
    exact = {name: part / total * width for name, part in parts.items()}
    cells = {name: int(value) for name, value in exact.items()}
    remaining = width - sum(cells.values())
    for name in sorted(exact, key=lambda value: cells[value] - exact[value])[:remaining]:
        cells[name] += 1
    return list(cells.items())


def draw_curve(values: Sequence[float], width: int, num_rows: int, symbols: SymbolSet) -> list[str]:
    """Draws a curve, the upper row first; each column is the mean of its values.

    A curve that spans a wide range has a logarithmic scale.
    """
    if width <= 0 or not values:
        return [""] * num_rows
    means = _resample(values, width)
    if 0 < LOG_SCALE_RATIO * min(means) < max(means):
        means = [math.log(mean) for mean in means]
    low, high = min(means), max(means)
    levels = len(symbols.curve) * num_rows
    span = high - low
    heights = [1 + round((mean - low) / span * (levels - 1)) if span else 1 for mean in means]
    rows = []
    for row in reversed(range(num_rows)):
        base = row * len(symbols.curve)
        filled = [min(len(symbols.curve), height - base) for height in heights]
        rows.append("".join(symbols.curve[mean - 1] if mean > 0 else " " for mean in filled))
    return rows


def _resample(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return [value for value in values for _ in range(width // len(values))]
    edges = [index * len(values) // width for index in range(width + 1)]
    pairs = itertools.pairwise(edges)
    return [sum(values[start:stop]) / (stop - start) for start, stop in pairs]


def truncate(text: str, width: int, ellipsis: str) -> str:
    """Truncates a text at its end."""
    return text if len(text) <= width else text[: max(0, width - 1)] + ellipsis


def abbreviate(name: str, width: int, ellipsis: str, *, host: bool = False) -> str:
    """Shortens a name in its middle: names differ at either end."""
    if len(name) <= width:
        return name
    first = name.split(".", 1)[0]
    if host and first and not first.isdecimal():  # drop its domain
        name = first
    if len(name) <= width or width < 4:
        return truncate(name, width, ellipsis)
    end = (width - 1) * 2 // 3
    return name[: width - 1 - end] + ellipsis + name[-end:]


def format_rate(rate: float) -> str:
    """Formats a rate: ``12.0``, ``1,234``, ``1.2 M``."""
    if rate >= 1e6:
        return f"{rate / 1e6:.1f} M"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def format_clock(seconds: float) -> str:
    """Formats a duration: ``0:01:23``."""
    minutes, remainder = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{remainder:02}"


def _has_load(host: HostState) -> bool:
    return host.cpu is not None or host.memory is not None
