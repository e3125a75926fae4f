"""Limits of pickles from files: checks one before it is unpickled, and does not unpickle."""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_OPCODES = 4 << 20
"""Bounds the time and memory of a check; weights of large models have 100,000."""
MIN_VISITS, VISITS_PER_OBJECT = 1_000_000, 100
"""Visits of objects that are always allowed, and additional ones for each object."""

_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"GET", "BINGET", "LONG_BINGET"}
_UPDATES = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_TOO_COMPLEX = "its objects share too many parts, are nested too deeply, or one holds itself"


def check_pickle(file: BinaryIO) -> None:
    """Refuses a pickle whose objects cannot be hashed or printed in reasonable time.

    If each of nested tuples holds the next one twice, the time to hash the outermost doubles with
    each level. Hashing very deep ones overflows the stack. So this counts the visits of a walk
    through each object and all its parts. Reads the file to the end of the pickle, and calls
    nothing that it names.

    Raises:
        EOFError: The file ends within the pickle.
        ValueError: The pickle is damaged or too long, or its objects are as described.
    """
    try:
        _count_visits(file)
    except LookupError:
        raise ValueError("an operation lacks an operand") from None


def _count_visits(file: BinaryIO) -> None:
    visits: list[int] = []  # of a walk through each object, by its number
    total = 0
    held: set[int] = set()  # parts of other objects: a pickler has completed them before
    stack: list[int] = []
    outer: list[list[int]] = []  # the stacks below each mark
    memo: dict[int, int] = {}
    for opcode, argument in _opcodes(file):
        if opcode.name == "MARK":
            outer.append(stack)
            stack = []
        elif opcode.name in _PUTS:
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif opcode.name in _GETS:
            stack.append(memo[argument])
        else:
            before, parts = opcode.stack_before, list[int]()
            if pickletools.markobject in before:
                before = before[: before.index(pickletools.markobject)]
                parts, stack = stack, outer.pop()
            parts += [stack.pop() for _ in before]
            if opcode.name in _UPDATES:
                target, num_outputs = parts.pop(), 1
            else:
                target, num_outputs = len(visits), len(opcode.stack_after)
                visits.append(1)
                total += 1
            held.update(parts)
            added = sum(visits[part] for part in parts)
            visits[target] += added
            total += added
            is_too_complex = total > MIN_VISITS + VISITS_PER_OBJECT * len(visits)
            if is_too_complex or (parts and target in held):
                raise ValueError(_TOO_COMPLEX)
            stack += [target] * num_outputs


def _opcodes(file: BinaryIO) -> Iterator[tuple[pickletools.OpcodeInfo, Any]]:
    opcodes = pickletools.genops(file)
    for _ in range(MAX_OPCODES):
        try:
            opcode, argument, _ = next(opcodes)
        except StopIteration:
            return
        except ValueError:
            if not file.read(1):
                raise EOFError("it ends too early") from None
            raise
        yield opcode, argument
    raise ValueError(f"more than {MAX_OPCODES:,} operations")
