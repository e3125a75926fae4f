"""The rules, one a file.

A new rule is one module with a ``rule`` and one line here. Of two that are equally sure, the one
that stands first speaks first; symptoms speak only when no cause is known.
"""

from __future__ import annotations

import importlib

from paceline.explain.rule import Rule

RULES: dict[str, str] = {
    "not-started": "paceline.explain.rules.not_started",
    "interrupted": "paceline.explain.rules.interrupted",
    "launcher-killed": "paceline.explain.rules.launcher_killed",
    "memory-killed": "paceline.explain.rules.memory_killed",
    "node-lost": "paceline.explain.rules.node_lost",
    "hang": "paceline.explain.rules.hang",
    "rank-absent": "paceline.explain.rules.rank_absent",
    "uneven-data": "paceline.explain.rules.uneven_data",
    "cuda-out-of-memory": "paceline.explain.rules.cuda_out_of_memory",
    "host-memory-refused": "paceline.explain.rules.host_memory_refused",
    "disk-full": "paceline.explain.rules.disk_full",
    "disk-quota": "paceline.explain.rules.disk_quota",
    "shared-memory-small": "paceline.explain.rules.shared_memory_small",
    "missing-module": "paceline.explain.rules.missing_module",
    "broken-library": "paceline.explain.rules.broken_library",
    "missing-file": "paceline.explain.rules.missing_file",
    "permission-denied": "paceline.explain.rules.permission_denied",
    "port-taken": "paceline.explain.rules.port_taken",
    "no-route": "paceline.explain.rules.no_route",
    "ssh-unreachable": "paceline.explain.rules.ssh_unreachable",
    "ssh-refused": "paceline.explain.rules.ssh_refused",
    "host-key-changed": "paceline.explain.rules.host_key_changed",
    "loopback-published": "paceline.explain.rules.loopback_published",
    "interface-missing": "paceline.explain.rules.interface_missing",
    "name-unknown": "paceline.explain.rules.name_unknown",
    "store-unreachable": "paceline.explain.rules.store_unreachable",
    "rendezvous-incomplete": "paceline.explain.rules.rendezvous_incomplete",
    "unplanned-world": "paceline.explain.rules.unplanned_world",
    "collective-mismatch": "paceline.explain.rules.collective_mismatch",
    "different-models": "paceline.explain.rules.different_models",
    "unused-parameters": "paceline.explain.rules.unused_parameters",
    "nan-loss": "paceline.explain.rules.nan_loss",
    "bad-sample": "paceline.explain.rules.bad_sample",
    "label-out-of-range": "paceline.explain.rules.label_out_of_range",
    "backend-missing": "paceline.explain.rules.backend_missing",
    "no-gpu": "paceline.explain.rules.no_gpu",
    "driver-too-old": "paceline.explain.rules.driver_too_old",
    "nccl-versions": "paceline.explain.rules.nccl_versions",
    "hub-unreachable": "paceline.explain.rules.hub_unreachable",
    "wrong-checkpoint": "paceline.explain.rules.wrong_checkpoint",
    "unsafe-checkpoint": "paceline.explain.rules.unsafe_checkpoint",
    "too-many-files": "paceline.explain.rules.too_many_files",
    "wrong-arguments": "paceline.explain.rules.wrong_arguments",
    "syntax-error": "paceline.explain.rules.syntax_error",
    "command-not-found": "paceline.explain.rules.command_not_found",
    "time-limit": "paceline.explain.rules.time_limit",
    "not-enough-slots": "paceline.explain.rules.not_enough_slots",
    "read-as-data": "paceline.explain.rules.read_as_data",
    "crashed": "paceline.explain.rules.crashed",
    "nccl-system-error": "paceline.explain.rules.nccl_system_error",
    "collective-timeout": "paceline.explain.rules.collective_timeout",
    "killed": "paceline.explain.rules.killed",
    "said-why": "paceline.explain.rules.said_why",
    "exception": "paceline.explain.rules.exception",
    "peer-gone": "paceline.explain.rules.peer_gone",
}


def load(code: str) -> Rule:
    """The rule of that code, imported now."""
    rule: Rule = importlib.import_module(RULES[code]).rule
    return rule


def load_all() -> list[Rule]:
    """Every rule, in order."""
    return [load(code) for code in RULES]
