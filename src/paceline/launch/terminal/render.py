"""What the live screen shows, drawn of a :class:`~paceline.launch.terminal.run_state.Board`. Pure.

From top to bottom: how far it is, a line for each rank, one for each host, curves, what happened,
the latest lines of the log, and the keys. What does not fit is summed up: ranks that fail, hang or
are slow are shown before all others.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from paceline.launch.terminal.run_state import TRAINING, Board, HostState, RankState, time_of
from paceline.spec.events import PART_NAMES
from paceline.spec.formatting import format_bit_rate, format_epoch, pluralize
from paceline.spec.terminal import fixed_width, wrap

WIDE = 116  # columns, from which a host's load stands beside its ranks
QUIET_S = 5.0  # without a word: others tell where they are each second
LEAST_LOG = 4  # lines
MOST_ROWS = 4  # of a line of the log
STEEP = 20.0  # highest by lowest value, from which a curve is drawn by its logarithm
MOST_BAR = 40
LEAST_CURVE = 12


@dataclass(frozen=True, slots=True)
class Signs:
    """What things are drawn with.

    Attributes:
        parts: Of a step, by name: one sign each, to be told apart without colours.
        curve: From low to high.
        full, empty: Of the bar of progress.
        line, dot, mark, more: Between parts, between words, of a chosen line, of what is cut.
    """

    parts: Mapping[str, str]
    curve: str
    full: str
    empty: str
    line: str
    dot: str
    mark: str
    more: str


FINE = Signs(
    {"computing": "█", "data": "▒", "waiting": "·", "moving": "═", "saving": "+", "other": "-"},
    "▁▂▃▄▅▆▇█", "━", "─", "─", "·", "▸", "…",
)  # fmt: skip
PLAIN = Signs(
    {"computing": "#", "data": "d", "waiting": ".", "moving": "=", "saving": "+", "other": "-"},
    "_.-=*#", "#", ".", "-", "|", ">", "~",
)  # fmt: skip
_COLOURS = {"computing": "green", "data": "yellow", "waiting": "bright_black", "moving": "cyan",
            "saving": "blue", "other": "magenta"}  # fmt: skip
_BAD, _DIM, _HEAD = "bold red", "bright_black", "bold"


@dataclass(frozen=True, slots=True)
class Around:
    """What stands around a board.

    Attributes:
        title: Of the run.
        seconds: Since it began.
        now: Of the board's clock.
        left_s: Until the end, as far as it can be told.
        chosen: The rank whose log is shown; ``None``: that of all.
        log: The latest lines, the last one last; may hold colours.
        log_title: Whose log that is.
        page: Shown in place of the log, where it is not empty.
        keys: The last line.
        notice: In its place, while there is something to say.
    """

    title: str = ""
    seconds: float = 0.0
    now: float = 0.0
    left_s: float | None = None
    chosen: int | None = None
    log: Sequence[str] = ()
    log_title: str = "log"
    page: Sequence[str] = ()
    keys: str = ""
    notice: str = ""


def frame(board: Board, around: Around, columns: int, lines: int,
          signs: Signs = FINE) -> list[Text]:  # fmt: skip
    """The whole screen: exactly so many lines, none wider than that."""
    drawing = _Drawing(board, around, columns, signs)
    head, room = drawing.head(), lines
    room -= len(head) + 1  # and the keys
    beside = columns >= WIDE
    hosts = [] if beside else drawing.hosts(max(2, lines // 5))
    news = drawing.news(5 if lines >= 36 else 3)
    curves = drawing.curves(1 if lines < 36 else 2, 1 if lines < 44 else 2)
    room -= len(hosts) + len(news) + len(curves)
    ranks = drawing.ranks(max(4, room - 1 - LEAST_LOG), beside)
    body = [*head, *ranks, *hosts, *curves, *news]
    body = body[: max(1, lines - 2)]
    log = drawing.log(max(0, lines - len(body) - 1))
    whole = [*body, *log][: lines - 1]
    whole += [Text()] * (lines - 1 - len(whole))
    whole.append(drawing.foot())
    for one in whole:
        one.plain = fixed_width(one.plain)  # of names and words that hosts and scripts have told
        one.no_wrap, one.overflow = True, "crop"
        one.truncate(columns)
    return whole


class _Drawing:
    """One picture.

    Args:
        board, around: What is drawn.
        columns: Width.
        signs: With what.
    """

    def __init__(self, board: Board, around: Around, columns: int, signs: Signs) -> None:
        self._board, self._around, self._columns, self._signs = board, around, columns, signs
        self._wrong = severities(board, around.now)
        self._tell = any(rank.heard is not None for rank in board.ranks.values())

    # --- how far it is -----------------------------------------------------------------------

    def head(self) -> list[Text]:
        board, around = self._board, self._around
        hosts = len({rank.host for rank in board.ranks.values()})
        there = sum(rank.state not in ("failed", "lost") for rank in board.ranks.values())
        some = f"{there} of " if there < len(board.ranks) else ""
        size = f"{some}{pluralize(len(board.ranks), 'rank')} on {pluralize(hosts, 'host')}"
        again = f" {self._signs.dot} start {board.attempt + 1}" if board.attempt else ""
        said, taken = f" {self._signs.dot} {size}{again}", f"{clock(around.seconds)} "
        room = self._columns - len(said) - len(taken) - 2
        run = shortened(around.title, room, self._signs.more)
        title = self._ends(f" {run}{said}", taken, _HEAD)
        progress = self._progress()
        return [title, progress] if progress is not None else [title]

    def _progress(self) -> Text | None:
        """How far the training is; ``None`` where nobody tells."""
        told, signs = self._board.progress, self._signs
        step, steps = _whole(told.get("step")), _whole(told.get("steps"))
        if step is None:
            return None
        parts = []
        if (epoch := _whole(told.get("epoch"))) is not None:
            parts.append(format_epoch(epoch, _whole(told.get("epochs"))))
        parts.append(f"step {step:,}" + (f"/{steps:,}" if steps else ""))
        # The sum of what the rows say, where they do; else that of the last record.
        each = [one.samples_per_s for one in self._board.ranks.values() if one.state == "ok"]
        known = [one for one in each if one is not None]
        rate = (
            sum(known) if known and len(known) == len(each) else _number(told.get("samples_per_s"))
        )
        if rate is not None:
            parts.append(f"{short(rate)} samples/s")
        if self._board.saved is not None:
            parts.append(f"saved at {self._board.saved:,}")
        done = f"{step / steps:.0%}" if steps else ""
        left = "" if self._around.left_s is None else f"{clock(self._around.left_s)} left"
        right = "  ".join(part for part in (done, left) if part)
        while len(parts) > 1 and len("  ".join([*parts, right])) + 1 > self._columns:
            parts.pop()  # the checkpoint first, then the rate
        words = Text(" " + "  ".join(parts))
        room = self._columns - words.cell_len - len(right) - 4
        if steps and room >= 8:
            full = round(min(1.0, step / steps) * room)
            words.append("  ").append(signs.full * full, "green")
            words.append(signs.empty * (room - full), _DIM).append(f" {right}")
        elif right:
            words.append(f"  {right}")
        return words

    # --- ranks -------------------------------------------------------------------------------

    def ranks(self, room: int, beside: bool) -> list[Text]:
        """A line for each of the most important ranks, one that sums up the others."""
        board = self._board
        shown, rest = chosen_ranks(board, self._around, room - 1)
        stepped = any(one.step is not None for one in board.ranks.values())
        rated = any(one.samples_per_s is not None for one in board.ranks.values())
        divided = any(one.parts for one in board.ranks.values())
        names = min(16, max([4, *(len(one.host) for one in shown)]))
        loads = beside and any(_known(one) for one in board.hosts.values())
        load = self._load_widths() if loads else 0
        head = Text("  rank ", _DIM).append("host".ljust(names)).append("  phase     ")
        taken = 7 + names + 12
        if stepped:
            head.append("     step")
            taken += 9
        if rated:
            head.append("  samples/s")
            taken += 11
        width = min(MOST_BAR, self._columns - taken - 2 - load - 1) if divided else 0
        if width >= 8:
            head.append("  time of a step")
        if loads:
            head = self._padded(head, self._columns - load)
            head.append(self._load_head())
        lines, before = [head], ""
        for one in shown:
            line = self._rank(one, names, stepped, rated, width)
            if loads and one.host != before and (host := board.hosts.get(one.host)):
                line = self._padded(line, self._columns - load).append_text(self._load(host))
            before = one.host
            lines.append(line)
        if rest:
            lines.append(self._summed(rest))
        if width >= 8:
            lines += self._legend([one for one in shown if one.state == "ok" and one.parts], width)
        return lines

    def _rank(self, rank: RankState, names: int, stepped: bool, rated: bool, width: int) -> Text:
        signs = self._signs
        style = _BAD if self._wrong[rank.rank] else ""
        chosen = rank.rank == self._around.chosen
        sign = "!" if style else " "
        line = Text(signs.mark if chosen else " ").append(sign, style)
        line.append(f"{rank.rank:>4} ").append(
            shortened(rank.host, names, signs.more, host=True).ljust(names)
        )
        line.append("  ").append(fitted(self._phase(rank), 10, signs.more).ljust(10), style)
        if stepped:
            line.append(f"{'' if rank.step is None else f'{rank.step:,}':>9}")
        ok = rank.state == "ok"
        if rated:
            rate = rank.samples_per_s if ok else None
            line.append(f"{'' if rate is None else short(rate):>11}")
        if width >= 8 and ok and rank.parts:
            line.append("  ").append_text(self.bar(rank.parts, width))
        elif not ok and rank.trouble:
            line.append(f"  {rank.trouble}", _BAD)
        if chosen:
            line.stylize("bold")
        return line

    def _phase(self, rank: RankState) -> str:
        """What a rank does, or what is wrong with it."""
        if rank.state != "ok":
            return rank.state
        slow, silent_s = self._board.slow, rank.silent_s(self._around.now)
        if silent_s is not None and silent_s >= QUIET_S and rank.phase == TRAINING:
            return f"quiet {silent_s:.0f} s"
        if slow is not None and slow.rank == rank.rank and rank.phase == TRAINING:
            return f"slow {slow.part:.0%}"
        if rank.heard is None and self._tell:
            return "starting"  # the others tell where they are: it will, too
        return rank.phase

    def bar(self, parts: Mapping[str, float], width: int) -> Text:
        """The time of a step as so many signs."""
        bar = Text()
        for name, count in cells(drawn(parts), width):
            bar.append(self._signs.parts[name] * count, _COLOURS[name])
        return bar

    def _legend(self, shown: Sequence[RankState], width: int) -> list[Text]:
        """What the signs in the bars of these ranks mean, on as many lines as that takes."""
        seen = {name for one in shown for name, count in cells(drawn(one.parts), width) if count}
        lines = [Text(" ")]
        for name, sign in self._signs.parts.items():
            if name in seen:
                if lines[-1].cell_len + 4 + len(PART_NAMES[name]) > self._columns:
                    lines.append(Text(" "))
                lines[-1].append(" ").append(sign * 2, _COLOURS[name])
                lines[-1].append(f" {PART_NAMES[name]}")
        return lines if seen else []

    def _summed(self, rest: Sequence[RankState]) -> Text:
        hosts = len({one.host for one in rest})
        steps = [one.step for one in rest if one.step is not None]
        text = f"       {pluralize(len(rest), 'more rank')} on {pluralize(hosts, 'host')}"
        phases = Counter(self._phase(one) for one in rest)
        told = [name if len(phases) == 1 else f"{count} {name}"
                for name, count in phases.most_common(3)]  # fmt: skip
        text += f": {', '.join(told)}"
        if steps:
            low, high = min(steps), max(steps)
            text += f", step {low:,}" + (f" to {high:,}" if high > low else "")
        divided = [one.parts for one in rest if one.parts]
        if divided:
            share = sum(parts.get("computing", 0.0) for parts in divided) / len(divided)
            text += f", computing {share:.0%}"
        return Text(text, _DIM)

    # --- hosts -------------------------------------------------------------------------------

    def hosts(self, room: int) -> list[Text]:
        """A line for each host, of many those that stand out."""
        ranks = sorted(self._board.ranks.values(), key=lambda one: -one.rank)
        first = {one.host: one.rank for one in ranks}  # the lowest of each host
        known = [one for one in self._board.hosts.values() if _known(one) or one.state == "lost"]
        known.sort(key=lambda one: first.get(one.name, len(ranks)))
        if not known:
            return []
        shown, rest = known, []
        if len(known) > room - 1:
            order = sorted(known, key=lambda one: (one.state == "ok", -(one.cpu or 0.0)))
            shown, rest = order[: max(1, room - 2)], order[max(1, room - 2) :]
        names = min(20, max([4, *(len(one.name) for one in shown)]))
        lines = [Text("  host ".ljust(4 + names), _DIM).append(self._load_head())]
        for one in shown:
            line = Text("  ").append(
                shortened(one.name, names, self._signs.more, host=True).ljust(names)
            )
            lines.append(line.append("  ").append_text(self._load(one)))
        if rest:
            cpus = [one.cpu for one in rest if one.cpu is not None]
            mean = f", cpu {sum(cpus) / len(cpus):.0%} on average" if cpus else ""
            lines.append(Text(f"  {pluralize(len(rest), 'more host')}{mean}", _DIM))
        return lines

    @property
    def _gpus(self) -> int:
        """Signs for the GPUs of a host."""
        most = max((len(host.gpus) for host in self._board.hosts.values()), default=0)
        return 0 if not most else min(5 * most, 20) + 1

    def _load_widths(self) -> int:
        return 12 + self._gpus + 26

    def _load_head(self) -> str:
        gpus = "gpu".rjust(self._gpus) if self._gpus else ""
        return f"   cpu   mem{gpus}{'in':>13}{'out':>13}"

    def _load(self, host: HostState) -> Text:
        if host.state == "lost":
            return Text(f"  {host.trouble or 'lost'}", _BAD)
        line = Text()
        for used in (host.cpu, host.memory):
            style = "yellow" if used is not None and used > 0.95 else ""
            line.append(f"{'' if used is None else f'{used:.0%}':>6}", style)
        if self._gpus:
            said = " ".join(f"{one:.0%}" for one in host.gpus)
            if len(said) >= self._gpus:  # too many: the least and the most busy
                said = f"{min(host.gpus):.0%}-{max(host.gpus):.0%}"
            line.append(said.rjust(self._gpus))
        for rate in (host.in_bps, host.out_bps):
            line.append(f"{'' if rate is None else format_bit_rate(rate):>13}")
        return line

    # --- curves, news, the log ---------------------------------------------------------------

    def curves(self, rows: int, tall: int) -> list[Text]:
        """The latest of the training and of evaluations, two or three beside each other."""
        board = self._board
        titles = sorted(board.curves, key=lambda title: (title.split()[0] != "train",
                                                        "loss" not in title))  # fmt: skip
        titles = [one for one in titles if board.curves[one].points]
        each = 2 if self._columns < 110 else 3
        titles = titles[: each * rows]
        lines: list[Text] = []
        for first in range(0, len(titles), each):
            lines += self._curve_row(titles[first : first + each], each, tall)
        return lines

    def _curve_row(self, titles: Sequence[str], each: int, tall: int) -> list[Text]:
        width = (self._columns - 2) // each
        lines = [Text("  ") for _ in range(tall)]
        for title in titles:
            value = self._board.last[title]
            figure = f" {value:.4g} "
            label = shortened(title, width - len(figure) - LEAST_CURVE, self._signs.more) + figure
            room = min(48, width - len(label) - 2)
            drawn = curve(self._board.curves[title].values, room, tall, self._signs)
            for at, row in enumerate(drawn):
                part = Text(label if at == tall - 1 else " " * len(label)).append(row, "cyan")
                lines[at].append_text(self._padded(part, width))
        return lines

    def news(self, most: int) -> list[Text]:
        """What happened last that was not usual, in at most so many lines."""
        told = [(item.bad, f"{time_of(item.time)}  {item.text}") for item in self._board.news]
        if self._board.hang:
            told.append((True, f"hangs: {self._board.hang}"))
        if self._board.waits:
            told.append((True, f"waits for nodes: {self._board.waits.words}"))
        lines: list[Text] = []
        for bad, text in reversed(told[-most:]):
            parts = textwrap.wrap(text, self._columns - 3)[:2]
            if len(lines) + len(parts) > most and lines:
                break
            rest = [Text(f"  {part}", _BAD if bad else "") for part in parts[1:]]
            sign = "! " if bad else "  "
            lines = [Text(f"{sign}{parts[0]}", _BAD if bad else ""), *rest, *lines]
        return lines

    def log(self, room: int) -> list[Text]:
        """Its title and as many lines as there is room for."""
        if room <= 0:
            return []
        around, dash = self._around, self._signs.line
        title = f"{dash * 2} {around.log_title} "
        rule = Text(title + dash * max(0, self._columns - len(title)), _DIM)
        if around.page:
            return [rule, *(Text(self._end_of(line)) for line in around.page[: room - 1])]
        lines: list[Text] = []
        for line in reversed(around.log):
            if len(lines) >= room - 1:
                break
            lines = [*self._folded(line), *lines]
        return [rule, *lines[max(0, len(lines) - room + 1) :]]

    def _end_of(self, line: str) -> str:
        """A line whose end says most, as a path's does."""
        room, indent = self._columns, len(line) - len(line.lstrip())
        if len(line) <= room:
            return line
        return line[:indent] + self._signs.more + line[len(line) - room + indent + 1 :]

    def _folded(self, line: str) -> list[Text]:
        """A line of a log, in as many as it takes; of a very long one the beginning."""
        if "\x1b" not in line:
            rows = wrap(line[: MOST_ROWS * self._columns], self._columns).split("\n")
            return [Text(row) for row in rows[:MOST_ROWS]]
        text = Text.from_ansi(line)
        at, cuts = 0, list[int]()
        while len(text) - at > self._columns and len(cuts) < MOST_ROWS:
            space = text.plain.rfind(" ", at + 1, at + self._columns)
            at = space + 1 if space > at else at + self._columns
            cuts.append(at)
        return list(text.divide(cuts))[:MOST_ROWS]

    def foot(self) -> Text:
        around = self._around
        if around.notice:
            return Text(f" {around.notice}", "reverse")
        keys = around.keys.split("  ")
        while len(keys) > 2 and len("  ".join(keys)) + 1 > self._columns:
            keys.pop(-2)  # the last one says where all of them are told
        return Text(f" {'  '.join(keys)}", _DIM)

    # --- lines -------------------------------------------------------------------------------

    def _ends(self, left: str, right: str, style: str) -> Text:
        room = self._columns - len(right) - 1
        left = fitted(left, room, self._signs.more)
        return Text(left.ljust(room) + " " + right, style)

    @staticmethod
    def _padded(line: Text, width: int) -> Text:
        line.truncate(max(0, width))
        line.pad_right(max(0, width - line.cell_len))
        return line


# --- what is worth a line ---------------------------------------------------------------------

SLOW, QUIET, HELD, GONE = 1, 2, 3, 4


def severities(board: Board, now: float) -> dict[int, int]:
    """How much each rank needs attention; 0: not at all."""
    silent = {
        rank: rank_state.silent_s(now)
        for rank, rank_state in board.ranks.items()
        if rank_state.state == "ok"
    }
    least = min(
        (rank_state for rank_state in silent.values() if rank_state is not None), default=0.0
    )
    slow = board.slow.rank if board.slow is not None else None
    severity = {}
    for rank, rank_state in board.ranks.items():
        silent_s = silent.get(rank)
        if rank_state.state in ("failed", "lost"):
            severity[rank] = GONE
        elif rank_state.state in ("frozen", "late"):
            severity[rank] = HELD
        elif silent_s is not None and silent_s >= QUIET_S + 2 * least:
            severity[rank] = QUIET
        else:
            severity[rank] = SLOW if rank == slow and rank_state.state == "ok" else 0
    return severity


def chosen_ranks(board: Board, around: Around,
                 room: int) -> tuple[list[RankState], list[RankState]]:  # fmt: skip
    """Ranks that get a line, in their order, and those that share one.

    Who fails, hangs or is slow comes first, then who waits least for others: it is the slowest.
    """
    ranks = [board.ranks[rank] for rank in sorted(board.ranks)]
    if len(ranks) <= room - 1:
        return ranks, []
    wrong = severities(board, around.now)
    met: set[tuple[str, int]] = set()  # hosts of which a rank stands for others in the same state
    others = set()
    for one in ranks:
        if wrong[one.rank] and (one.host, wrong[one.rank]) in met:
            others.add(one.rank)
        met.add((one.host, wrong[one.rank]))

    def order(one: RankState) -> tuple[bool, bool, int, bool, float, int]:
        waits = one.parts.get("waiting", 1.0)
        usual = one.phase == TRAINING and one.state == "ok"
        return (one.rank != around.chosen, one.rank in others, -wrong[one.rank], usual, waits,
                one.rank)  # fmt: skip

    first = {one.rank for one in sorted(ranks, key=order)[: max(1, room - 2)]}
    return ([one for one in ranks if one.rank in first],
            [one for one in ranks if one.rank not in first])  # fmt: skip


# --- drawing ----------------------------------------------------------------------------------


def drawn(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts of a step in the order in which they are drawn; what is not told is other."""
    own = {name: parts.get(name, 0.0) for name in FINE.parts if name != "other"}
    return {**own, "other": max(0.0, 1 - sum(own.values()))}


def told_parts(parts: Mapping[str, float]) -> str:
    """``71% computing, 20% waiting for slower ranks``: those that matter."""
    told = sorted(drawn(parts).items(), key=lambda one: -one[1])
    return ", ".join(f"{part:.0%} {PART_NAMES[name]}" for name, part in told if part >= 0.005)


def cells(parts: Mapping[str, float], width: int) -> list[tuple[str, int]]:
    """How many of so many signs each part gets: together exactly these."""
    total = sum(parts.values()) or 1.0
    exact = {name: part / total * width for name, part in parts.items()}
    counts = {name: int(one) for name, one in exact.items()}
    left = width - sum(counts.values())
    for name in sorted(exact, key=lambda one: counts[one] - exact[one])[:left]:
        counts[name] += 1
    return list(counts.items())


def curve(values: Sequence[float], width: int, tall: int, signs: Signs) -> list[str]:
    """A curve of so many columns and rows, the upper row first; of many values means.

    One that falls or rises very far is drawn by its logarithm.
    """
    if width <= 0 or not values:
        return [""] * tall
    means = _thinned(values, width)
    if 0 < STEEP * min(means) < max(means):
        means = [math.log(one) for one in means]
    low, high = min(means), max(means)
    levels = len(signs.curve) * tall
    span = high - low
    heights = [1 + round((one - low) / span * (levels - 1)) if span else 1 for one in means]
    rows = []
    for row in reversed(range(tall)):
        base = row * len(signs.curve)
        over = [min(len(signs.curve), height - base) for height in heights]
        rows.append("".join(signs.curve[one - 1] if one > 0 else " " for one in over))
    return rows


def _thinned(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return [one for one in values for _ in range(width // len(values))]
    edges = [at * len(values) // width for at in range(width + 1)]
    pairs = itertools.pairwise(edges)
    return [sum(values[first:last]) / (last - first) for first, last in pairs]


def fitted(text: str, width: int, more: str) -> str:
    """The text in so many columns."""
    return text if len(text) <= width else text[: max(0, width - 1)] + more


def shortened(name: str, width: int, more: str, *, host: bool = False) -> str:
    """A name in so many columns, by which it can be told from others: they differ at either end."""
    if len(name) <= width:
        return name
    first = name.split(".", 1)[0]
    if host and first and not first.isdecimal():  # without its domain
        name = first
    if len(name) <= width or width < 4:
        return fitted(name, width, more)
    end = (width - 1) * 2 // 3
    return name[: width - 1 - end] + more + name[-end:]


def short(rate: float) -> str:
    """``12``, ``1,234``, ``1.2 M``."""
    if rate >= 1e6:
        return f"{rate / 1e6:.1f} M"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def clock(seconds: float) -> str:
    """``0:01:23``."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _known(host: HostState) -> bool:
    return host.cpu is not None or host.memory is not None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if fine else None  # type: ignore[arg-type]
