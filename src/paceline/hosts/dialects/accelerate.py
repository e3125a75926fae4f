"""Accelerate's YAML, one file for each host: the first host's name and the number of hosts.

If it names a DeepSpeed host file, that file has all hosts and is read instead.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from paceline.hosts.dialect import Dialect, FileReference, Parsed, Reading, line_error, printable
from paceline.hosts.dialects.torchrun import derive_hosts
from paceline.hosts.lines import split_lines
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Cluster

MARK = re.compile(
    r"^(compute_environment|num_machines|main_process_ip|machine_rank|deepspeed_\w+)\s*:", re.M
)
DEFAULT_PORT = 29500
_MAX_YAML_NODES = 200_000  # a node takes half a kilobyte and, with its tokens, 13 µs
_MAX_INTEGER_LENGTH = 100
"""Characters of an integer: PyYAML takes quadratic time for `1:1:1:…`, which has base 60."""


def detect(reading: Reading) -> bool:
    """Whether the file has the ending, or a key that only this format has."""
    ending = reading.label.endswith((".yaml", ".yml"))
    return bool(reading.text) and (ending or bool(MARK.search(reading.text)))


def parse(reading: Reading) -> Parsed:
    """Returns the hosts, or the DeepSpeed host file to read instead."""
    settings = _settings(reading)
    hostfile = _deepspeed_hostfile(settings)
    if hostfile:
        return Parsed(
            notes=(f"host file named by {reading.label}",), reference=FileReference(hostfile)
        )
    if "num_machines" not in settings:  # some other YAML; one host would be a guess
        raise line_error(reading.label, 1, split_lines(reading.text)[0], "a key `num_machines`")
    count = _integer(reading, settings, "num_machines", 1, minimum=1)
    processes = _integer(reading, settings, "num_processes", 0, minimum=0)
    hosts = derive_hosts(
        reading.label,
        str(settings.get("main_process_ip") or ""),
        reading.hostname,
        _integer(reading, settings, "machine_rank", 0, minimum=0),
        count,
        _slots_per_host(reading, processes, count),
    )
    return Parsed(hosts, _notes(settings))


def write(cluster: Cluster) -> str:
    """Writes the file of the first machine; ``machine_rank`` counts up on the others."""
    slots = [host.slots or 1 for host in cluster.hosts]
    lines = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU  # MULTI_XPU with Intel's; MULTI_CPU would need mpirun",
        "machine_rank": f"0  # on the hosts in order: 0 to {len(slots) - 1}",
        "main_process_ip": f'"{cluster.hosts[0].address}"',
        "main_process_port": str(DEFAULT_PORT),
        "num_machines": str(len(slots)),
        "num_processes": f"{sum(slots)}  # of all hosts together",
        "rdzv_backend": "static",
        "same_network": "true",
        "use_cpu": "false  # true without GPUs",
    }
    return "".join(f"{key}: {value}\n" for key, value in lines.items())


def load_yaml(reading: Reading, text: str, expected: str) -> Any:
    """Parses YAML. Raises HostsError with the line of the error.

    Args:
        text: That of ``reading``, or one with the same lines.
        expected: What the error says should be there.
    """
    import yaml  # costs 20 ms; only two dialects need it

    try:
        loader = yaml.SafeLoader(text)
        compose, numbers = loader.compose_node, itertools.count(1)

        def compose_node(parent: Any, index: Any) -> Any:
            nonlocal expected
            if next(numbers) > _MAX_YAML_NODES:
                expected = f"at most {_MAX_YAML_NODES:,} nodes"
                raise ValueError(expected)
            return compose(parent, index)

        loader.compose_node = compose_node  # type: ignore[method-assign]
        node = loader.get_single_node()
        if node is None:
            return None
        sizes: dict[Any, float] = {}
        if _expanded_size(node, sizes) > _MAX_YAML_NODES:
            expected = f"aliases that stand for at most {_MAX_YAML_NODES:,} nodes in all"
            raise ValueError(expected)
        for part in sizes:
            if part.tag == "tag:yaml.org,2002:int" and len(part.value) > _MAX_INTEGER_LENGTH:
                expected = f"numbers of at most {_MAX_INTEGER_LENGTH} characters"
                raise yaml.MarkedYAMLError(problem_mark=part.start_mark)
        return loader.construct_document(node)
    except Exception as problem:  # ValueError: a date 2026-99-99; KeyError: `!!bool x`; and others
        mark = getattr(problem, "problem_mark", None)
        lines = split_lines(reading.text.rstrip())
        number = min(mark.line + 1 if mark else 1, len(lines))
        raise line_error(reading.label, number, lines[number - 1], expected) from None


def _expanded_size(node: Any, sizes: dict[Any, float]) -> float:
    """Returns how many nodes a YAML node has if each alias is replaced by what it names.

    Args:
        node: A scalar, whose value is text; a sequence of nodes; or a mapping of pairs of nodes.
        sizes: Sizes of nodes that were counted before.
    """
    if node not in sizes:
        sizes[node] = math.inf  # for a node that contains itself
        children = () if isinstance(node.value, str) else node.value
        parts = [
            part for child in children for part in (child if type(child) is tuple else [child])
        ]
        sizes[node] = 1 + sum(_expanded_size(part, sizes) for part in parts)
    return sizes[node]


def _settings(reading: Reading) -> Mapping[str, Any]:
    loaded = load_yaml(reading, reading.text, "YAML as `accelerate config` writes it")
    if not isinstance(loaded, dict):
        raise line_error(reading.label, 1, reading.text.split("\n")[0], "`key: value` lines")
    return loaded


def _deepspeed_hostfile(settings: Mapping[str, Any]) -> str:
    deepspeed = settings.get("deepspeed_config")
    nested = deepspeed.get("deepspeed_hostfile") if isinstance(deepspeed, dict) else None
    return str(nested or settings.get("deepspeed_hostfile") or "")


def _integer(
    reading: Reading, settings: Mapping[str, Any], key: str, default: int, *, minimum: int
) -> int:
    value = settings.get(key, default)
    if isinstance(value, str) and value.isdecimal() and len(value) <= _MAX_INTEGER_LENGTH:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        number, line = _line_of(reading.text, key)
        raise line_error(reading.label, number, line, f"{key} to be a whole number from {minimum}")
    return value


def _line_of(text: str, key: str) -> tuple[int, str]:
    lines = enumerate(split_lines(text), start=1)
    return next(((n, line) for n, line in lines if line.strip().startswith(key)), (1, key))


def _slots_per_host(reading: Reading, processes: int, hosts: int) -> int | None:
    if processes % hosts:
        raise HostsError(
            f"{reading.label}: {processes} processes do not divide over {hosts} hosts",
            found=printable(f"num_processes: {processes}, num_machines: {hosts}"),
            remedy="set num_processes to a multiple of num_machines, or name hosts with slots",
        )
    return processes // hosts or None


def _notes(settings: Mapping[str, Any]) -> tuple[str, ...]:
    port = settings.get("main_process_port")
    if not port:
        return ()
    return (f"main_process_port {port} is not needed here: a free port is found",)


DIALECT = Dialect(
    name="accelerate",
    title="Accelerate configuration",
    detect=detect,
    parse=parse,
    write=write,
    is_complete=False,
)
