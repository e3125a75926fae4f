"""The help of a verb: its options in groups, those at hand first, the others on request."""

from __future__ import annotations

from collections.abc import Sequence

import click

from paceline.spec.helptext import WIDTH, Row, Section, render

# title → parameters, in the order of the help; what stands in none is the verb's own
GROUPS: dict[str, tuple[str, ...]] = {
    "Hosts and processes": (
        "hosts", "ssh_config", "nnodes", "fastest", "nproc_per_node", "python", "iface", "via",
        "wait_for_nodes", "accept_new_host_keys", "master_port", "backend", "bind", "encrypt",
    ),
    "The run": (
        "run_dir", "name", "plan_only", "verbose", "as_json", "env", "unset", "activate", "show",
        "pass_local_rank", "verify", "measure", "any_world", "rejoin",
        "screen", "check_level", "max_restarts", "restart_window", "hang_timeout", "debug",
        "ship", "follow_links", "lease", "grace", "keep_warm", "notify", "report", "detach", "keep",
        "supervisor", "keep_results",
    ),
    "The same command typed on each node": (
        "rdzv", "rdzv_id", "rdzv_key_file", "node_rank", "rdzv_timeout",
    ),
    "MPI and containers": ("mpiexec", "image", "mount", "shm_size", "via_arg"),
    "Batch systems": (
        "time_limit", "partition", "account", "cpus_per_task", "mem", "gpus", "gpus_per_node",
        "gres", "constraint", "array", "requeue", "setup_command", "sbatch_arg",
    ),
}  # fmt: skip
COMMON = frozenset({
    "hosts", "ssh_config", "nnodes", "nproc_per_node", "via", "run_dir", "name", "plan_only",
    "env", "show", "check_level", "max_restarts", "detach",
})  # fmt: skip
_GROUPED = frozenset(name for names in GROUPS.values() for name in names)
MIN_GROUPED = 20  # a verb with fewer options shows all of them at once


def render_help(
    ctx: click.Context, extra_sections: Sequence[Section] = (), show_all: bool = False
) -> str:
    """Renders the help of the context's verb; ``extra_sections`` precede its options."""
    command = ctx.command
    options = applicable_options(command, command.get_params(ctx))
    is_short = len(options) < MIN_GROUPED
    visible = [o for o in options if is_short or show_all or o.name not in _GROUPED - COMMON]
    own_options = [o for o in visible if o.name not in _GROUPED]
    by_name = {option.name: option for option in visible}
    groups = {title: [by_name[name] for name in names if name in by_name]
              for title, names in GROUPS.items()}  # fmt: skip
    if is_short:  # short enough for one list
        own_options, groups = visible, {}
    sections: dict[str, list[Row]] = {title: list(rows) for title, rows in extra_sections}
    sections.setdefault("Options", []).extend(row_of(option) for option in own_options)
    sections |= {title: [row_of(member) for member in members] for title, members in groups.items()}
    footer = []
    if len(visible) < len(options):
        footer.append(f"{len(options) - len(visible)} more options: {ctx.command_path} --help-all")
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    import shutil

    width = shutil.get_terminal_size((WIDTH, 24)).columns
    return render(usage, command.help or "", list(sections.items()), footer, width)


def applicable_options(
    command: click.Command, params: Sequence[click.Parameter]
) -> list[click.Option]:
    """Returns the options that have an effect with the verb, without aliases."""
    options = [param for param in params if isinstance(param, click.Option) and not param.hidden]
    if not _GROUPED.intersection(option.name for option in options):
        return options
    from paceline.cli.applicability import OPTIONS, VERBS

    verb = command.name or ""
    if verb not in VERBS:
        return options
    return [o for o in options if o.name not in OPTIONS or verb in OPTIONS[o.name].verbs]


def has_hidden_options(command: click.Command) -> bool:
    """Returns whether the short help leaves options out."""
    names = [option.name for option in applicable_options(command, command.params)]
    return len(names) >= MIN_GROUPED - 1 and not COMMON.issuperset(_GROUPED.intersection(names))


def row_of(option: click.Option) -> Row:
    flags = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        flags += " / " + ", ".join(option.secondary_opts)
    choices: tuple[str, ...] = ()
    if not option.is_flag and not option.count:
        choices = tuple(option.type.choices) if isinstance(option.type, click.Choice) else ()
        flags += f" {_metavar(option, choices)}"
        choices = () if "|" in flags else choices
    return Row(flags, option.help or "", _default(option), choices, option.required)


def _metavar(option: click.Option, choices: Sequence[str]) -> str:
    if option.metavar:
        return option.metavar
    if choices:
        joined = "|".join(choices)
        return joined if len(joined) <= 24 else "NAME"
    if isinstance(option.type, click.Path):
        return "FILE" if not option.type.dir_okay else "FOLDER"
    return {"integer": "N", "integer range": "N", "float": "X"}.get(option.type.name, "TEXT")


def _default(option: click.Option) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    value = option.default
    if option.is_flag:
        return ("on" if value is True else "off") if option.secondary_opts else ""
    is_unset = type(value).__name__ == "Sentinel"  # click 8.2 and later mark a missing default so
    if value is None or option.multiple or callable(value) or value == "" or is_unset:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)
