"""Tests the share of the event loop's time that the frames of one host may take."""

from __future__ import annotations

import pytest

from paceline.remote.work_share import MAX_PAUSE_S, MAX_SHARE, MAX_WORK_S, WorkShare


@pytest.mark.parametrize("work_s", [0.0001, 0.03, 0.5])
def test_busy_host_gets_its_share(work_s: float) -> None:
    share, now, num_frames, max_busy_s, busy_s = WorkShare(), 100.0, 0, 0.0, 0.0
    while now < 130.0:
        started_at, now = now, now + work_s
        num_frames += 1
        busy_s += work_s
        max_busy_s = max(max_busy_s, busy_s)
        if pause_s := share.pause_s(started_at, now):
            now, busy_s = now + pause_s, 0.0
    assert num_frames * work_s / 30 < MAX_SHARE + 0.02
    assert max_busy_s <= max(work_s, MAX_WORK_S + 2 * work_s)


def test_stopped_launcher_is_no_work_of_a_host() -> None:
    share = WorkShare()
    assert share.pause_s(0.0, 20.0) == MAX_PAUSE_S
    assert not share.pause_s(21.0, 21.01)


def test_moderate_work_is_not_paused() -> None:
    share = WorkShare()
    assert not any(share.pause_s(start / 10, start / 10 + 0.04) for start in range(1000))
    assert share.pause_s(200.0, 200.2)
    assert not share.pause_s(201.0, 201.01)  # the former work was long ago
