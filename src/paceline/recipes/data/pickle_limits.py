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
    visits: list[int] = []  # of a walk through each object, by its number
    total = 0
    held: set[int] = set()  # parts of other objects: a pickler has completed them before
    stack: list[int] = []
    marks: list[int] = []  # heights of the stack
    memo: dict[int, int] = {}
    for opcode, argument in _opcodes(file):
        if opcode.name == "MARK":
            marks.append(len(stack))
        elif opcode.name in _PUTS:
            _require(stack, marks, 1)
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif opcode.name in _GETS:
            if argument not in memo:
                raise ValueError(f"it has no object {argument}")
            stack.append(memo[argument])
        else:
            operands = _pop_operands(opcode, stack, marks)
            if opcode.name in _UPDATES:
                target, *parts = operands
            else:
                target, parts = len(visits), operands
                visits.append(1)
                total += 1
            held.update(parts)
            added = sum(visits[part] for part in parts)
            visits[target] += added
            total += added
            is_too_complex = total > MIN_VISITS + VISITS_PER_OBJECT * len(visits)
            if is_too_complex or (parts and target in held):
                raise ValueError(_TOO_COMPLEX)
            outputs = 1 if opcode.name in _UPDATES else len(opcode.stack_after)
            stack += [target] * outputs


def _pop_operands(opcode: pickletools.OpcodeInfo, stack: list[int], marks: list[int]) -> list[int]:
    """Removes the operands of an operation from the stack, and its mark; returns them."""
    before = opcode.stack_before
    operands: list[int] = []
    count = len(before)
    if pickletools.markobject in before:
        count = before.index(pickletools.markobject)
        height = marks.pop() if marks else len(stack) + 1
        _require(stack, [height], 0)
        operands = stack[height:]
        del stack[height:]
    _require(stack, marks, count)
    operands = stack[len(stack) - count :] + operands
    del stack[len(stack) - count :]
    return operands


def _require(stack: list[int], marks: list[int], count: int) -> None:
    if len(stack) - count < (marks[-1] if marks else 0):
        raise ValueError("an operation lacks an operand")


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
