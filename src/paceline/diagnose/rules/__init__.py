"""The rules, one a file.

A new rule is one module with a ``rule`` and one line here. Of two that are equally sure, the one
that stands first speaks first; symptoms speak only when no cause is known.
"""

from __future__ import annotations

import importlib

from paceline.diagnose.rule import Rule

RULES: dict[str, str] = {
    "not-started": "paceline.diagnose.rules.not_started",
    "interrupted": "paceline.diagnose.rules.interrupted",
    "launcher-killed": "paceline.diagnose.rules.launcher_killed",
    "memory-killed": "paceline.diagnose.rules.memory_killed",
    "node-lost": "paceline.diagnose.rules.node_lost",
    "hang": "paceline.diagnose.rules.hang",
    "rank-absent": "paceline.diagnose.rules.rank_absent",
    "uneven-data": "paceline.diagnose.rules.uneven_data",
    "cuda-out-of-memory": "paceline.diagnose.rules.cuda_out_of_memory",
    "host-memory-refused": "paceline.diagnose.rules.host_memory_refused",
    "disk-full": "paceline.diagnose.rules.disk_full",
    "disk-quota": "paceline.diagnose.rules.disk_quota",
    "shared-memory-small": "paceline.diagnose.rules.shared_memory_small",
    "missing-module": "paceline.diagnose.rules.missing_module",
    "broken-library": "paceline.diagnose.rules.broken_library",
    "missing-file": "paceline.diagnose.rules.missing_file",
    "permission-denied": "paceline.diagnose.rules.permission_denied",
    "port-taken": "paceline.diagnose.rules.port_taken",
    "no-route": "paceline.diagnose.rules.no_route",
    "ssh-unreachable": "paceline.diagnose.rules.ssh_unreachable",
    "ssh-refused": "paceline.diagnose.rules.ssh_refused",
    "host-key-changed": "paceline.diagnose.rules.host_key_changed",
    "loopback-published": "paceline.diagnose.rules.loopback_published",
    "interface-missing": "paceline.diagnose.rules.interface_missing",
    "name-unknown": "paceline.diagnose.rules.name_unknown",
    "store-unreachable": "paceline.diagnose.rules.store_unreachable",
    "rendezvous-incomplete": "paceline.diagnose.rules.rendezvous_incomplete",
    "unplanned-world": "paceline.diagnose.rules.unplanned_world",
    "collective-mismatch": "paceline.diagnose.rules.collective_mismatch",
    "different-models": "paceline.diagnose.rules.different_models",
    "unused-parameters": "paceline.diagnose.rules.unused_parameters",
    "nan-loss": "paceline.diagnose.rules.nan_loss",
    "bad-sample": "paceline.diagnose.rules.bad_sample",
    "label-out-of-range": "paceline.diagnose.rules.label_out_of_range",
    "backend-missing": "paceline.diagnose.rules.backend_missing",
    "no-gpu": "paceline.diagnose.rules.no_gpu",
    "driver-too-old": "paceline.diagnose.rules.driver_too_old",
    "nccl-versions": "paceline.diagnose.rules.nccl_versions",
    "hub-unreachable": "paceline.diagnose.rules.hub_unreachable",
    "wrong-checkpoint": "paceline.diagnose.rules.wrong_checkpoint",
    "unsafe-checkpoint": "paceline.diagnose.rules.unsafe_checkpoint",
    "too-many-files": "paceline.diagnose.rules.too_many_files",
    "wrong-arguments": "paceline.diagnose.rules.wrong_arguments",
    "syntax-error": "paceline.diagnose.rules.syntax_error",
    "command-not-found": "paceline.diagnose.rules.command_not_found",
    "time-limit": "paceline.diagnose.rules.time_limit",
    "not-enough-slots": "paceline.diagnose.rules.not_enough_slots",
    "read-as-data": "paceline.diagnose.rules.read_as_data",
    "crashed": "paceline.diagnose.rules.crashed",
    "nccl-system-error": "paceline.diagnose.rules.nccl_system_error",
    "collective-timeout": "paceline.diagnose.rules.collective_timeout",
    "killed": "paceline.diagnose.rules.killed",
    "said-why": "paceline.diagnose.rules.said_why",
    "exception": "paceline.diagnose.rules.exception",
    "peer-gone": "paceline.diagnose.rules.peer_gone",
}


def load(code: str) -> Rule:
    """The rule of that code, imported now."""
    rule: Rule = importlib.import_module(RULES[code]).rule
    return rule


def load_all() -> list[Rule]:
    """Every rule, in order."""
    return [load(code) for code in RULES]
