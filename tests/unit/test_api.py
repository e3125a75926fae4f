"""Tests how arguments of the Python interface become settings of a job."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from paceline import api


@pytest.mark.parametrize("follow", [False, True])
def test_links_are_followed_only_on_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, follow: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    plan_job = Mock()
    monkeypatch.setattr(api, "plan_job", plan_job)
    job = api.prepare("train.py", torch=False, follow_links=follow).job
    assert job.follow_links is follow
    assert plan_job.call_args.args[0] is job
