"""Runs many cases of one rule as one test, which reports every case that fails."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each_case(
    names: str | tuple[str, ...], values: Iterable[Any], ids: Callable[[Any], str] = repr
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test function for each value like ``pytest.mark.parametrize``, but as one test.

    Use it if hundreds of small cases obey one rule. All cases share the test's fixtures, so a test
    that changes a folder or the environment needs ``parametrize``.

    Args:
        names: Name of the argument, or a tuple of names if values are tuples.
        values: One value for each case.
        ids: Returns the description of a value for the report.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failures = []
            for value in cases:
                arguments = (
                    {names: value}
                    if isinstance(names, str)
                    else dict(zip(names, value, strict=True))
                )
                try:
                    test(**arguments, **fixtures)
                except (Exception, pytest.fail.Exception):
                    failures.append(f"{ids(value)}\n{traceback.format_exc(limit=-3)}")
            if failures:
                shown = "\n".join(failures[:20])
                pytest.fail(f"{len(failures)} of {len(cases)} cases fail:\n{shown}", pytrace=False)

        cases = [_plain(value) for value in values]
        assert cases, f"{test.__name__} has no cases"
        own = {names} if isinstance(names, str) else set(names)
        signature = inspect.signature(test)
        fixtures = [p for name, p in signature.parameters.items() if name not in own]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        del run.__wrapped__  # otherwise pytest reads the original signature
        return run

    return decorate


def _plain(value: Any) -> Any:
    """Returns the value of a ``pytest.param``, or the value itself."""
    if not isinstance(value, type(pytest.param())):
        return value
    return value.values[0] if len(value.values) == 1 else value.values
