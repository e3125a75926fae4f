"""A pytest plug-in for Pythons without torch: skips what needs torch, and reports how much.

Run ``python -m pytest -p without_torch tests/unit`` with ``tests`` on PYTHONPATH; see
``tools/pythons.py``. Where torch is installed, this plug-in is not used and nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

NEEDING = {"torch", "numpy", "PIL", "safetensors", "transformers", "tokenizers", "datasets",
           "sacrebleu", "onnx", "onnxscript", "onnxruntime", "accelerate"}  # fmt: skip
_left_out: set[str] = set()


def _needed(error: BaseException | None) -> bool:
    """Returns whether a failed import of one of these packages caused the error."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] in NEEDING:
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call is not None and _needed(call.excinfo.value):
        _left_out.add(collector.nodeid)
        report.outcome, report.longrepr, report.result = "passed", None, []
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None and _needed(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (item.nodeid, 0, "needs torch")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.write_line(f"{len(_left_out)} files need torch: " + ", ".join(_left_out))
