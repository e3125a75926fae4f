"""The explanation after a failure: bounded in time, and ended by Ctrl-C."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from paceline.cli import explain, preflight
from paceline.spec.failure import Result


def test_a_slow_rule_does_not_hold_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain, "after_failure", lambda *run: re.match("(a+)+$", "a" * 60 + "b"))
    monkeypatch.setattr(preflight, "EXPLAIN_S", 0.2)
    preflight.explain_run(tmp_path, Result(1), (), shown=True)
    assert "to look for the cause: paceline explain" in capsys.readouterr().err


def test_ctrl_c_in_the_explanation_leaves_the_exit_status_to_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain KeyboardInterrupt out of ``exec`` would make Python die of SIGINT in any case."""

    def interrupted(*run: object) -> None:
        exec("import signal; signal.raise_signal(signal.SIGINT)")

    monkeypatch.setattr(explain, "after_failure", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        preflight.explain_run(tmp_path, Result(1), (), shown=True)
    assert caught.type is not KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
