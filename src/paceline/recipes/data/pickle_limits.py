"""Limits of pickles from files: checks one before it is unpickled, and does not unpickle."""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_OPCODES = 4 << 20
"""Bounds the time and memory of a check; weights of large models have 100,000."""
MIN_WORK, WORK_PER_OBJECT = 1_000_000, 100
"""Visits of objects that are always allowed, and additional ones for each object."""

_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}
_UPDATES = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}


def check_pickle(file: BinaryIO) -> None:
    """Refuses a pickle whose objects cannot be hashed or printed in reasonable time.

    If each of nested tuples holds the next one twice, the time to hash the outermost doubles with
    each level. Hashing very deep ones overflows the stack. Reads the file to the end of the pickle,
    and calls nothing that it names.

    Raises:
        EOFError: The file ends within the pickle.
        ValueError: The pickle is damaged or too long, or its objects are as described.
    """
    parts = _parts(file)
    budget = MIN_WORK + WORK_PER_OBJECT * len(parts)
    # Ways to reach an object from any other: as many visits as visiting each with all its parts.
    ways = [1] * len(parts)
    num_holders = [0] * len(parts)
    for part in (part for held in parts for part in held):
        num_holders[part] += 1
    ready = [number for number, count in enumerate(num_holders) if not count]
    num_done = 0
    while ready:
        number = ready.pop()
        num_done += 1
        budget -= ways[number]
        if budget < 0:
            raise ValueError("its objects are nested too deeply or share too many parts")
        for part in parts[number]:
            ways[part] += ways[number]
            num_holders[part] -= 1
            if not num_holders[part]:
                ready.append(part)
    if num_done < len(parts):
        raise ValueError("an object of it holds itself")


def _parts(file: BinaryIO) -> list[list[int]]:
    """Returns the numbers of the objects that each object of a pickle holds or is made from."""
    parts: list[list[int]] = []
    stack: list[int] = []
    marks: list[int] = []  # heights of the stack
    memo: dict[int, int] = {}
    for opcode, argument in _opcodes(file):
        if opcode.name in _PUTS or opcode.name == "MEMOIZE":
            _require(stack, marks, 1)
            memo[len(memo) if argument is None else argument] = stack[-1]
            continue
        if opcode.name in _GETS:
            if argument not in memo:
                raise ValueError(f"it has no object {argument}")
            stack.append(memo[argument])
            continue
        if opcode.name == "MARK":
            marks.append(len(stack))
            continue
        operands: list[int] = []
        count = len(opcode.stack_before)
        if pickletools.markobject in opcode.stack_before:
            count = opcode.stack_before.index(pickletools.markobject)
            height = marks.pop() if marks else len(stack) + 1
            _require(stack, [height], 0)
            operands = stack[height:]
            del stack[height:]
        _require(stack, marks, count)
        operands = stack[len(stack) - count :] + operands
        del stack[len(stack) - count :]
        if opcode.name in _UPDATES:
            parts[operands[0]] += operands[1:]
            stack.append(operands[0])
        elif opcode.stack_after:
            stack += [len(parts)] * len(opcode.stack_after)
            parts.append(operands)
    return parts


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
