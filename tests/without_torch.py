"""A pytest plug-in for Pythons that have no torch: leaves out what needs it, and says how much.

``python -m pytest -p without_torch tests/unit`` with ``tests`` on PYTHONPATH; see
``tools/pythons.py``. Where torch is, this plug-in is not used: nothing is ever left out there.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

NEEDING = {"torch", "numpy", "PIL", "safetensors", "transformers", "tokenizers", "datasets",
           "sacrebleu", "onnx", "onnxscript", "onnxruntime", "accelerate"}  # fmt: skip
_left_out: set[str] = set()


def _needed(error: BaseException | None) -> bool:
    """Whether somewhere behind an error one of those was to be imported."""
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
