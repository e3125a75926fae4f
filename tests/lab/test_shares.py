"""Tests our use of locks, renames and flushes on a real SMB share that a kernel mounts.

This machine's kernel may not support SMB, so a user-mode kernel mounts the share (``uml.py``).
``bench/shares`` does the same with NFS, and trains a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import uml

pytestmark = pytest.mark.lab

TRIALS = {
    "types": ["cifs", "cifs"],
    "a_lock_holds_for_both": [True, False, True, True],
    "a_file_is_replaced_while_it_is_read": [["new from a"] * 2, ["new from b"] * 2],
    "what_arrives_is_whole_on_the_other_host": "[2]",
    "checkpoints": [["another job writes to "] * 2, [10, 20, 30], 30, 100_000, True],
    "a_data_set_is_downloaded_once_by_two_hosts": [["/x"], [300_000] * 2],
    "the_cache_of_an_agent": [
        [],
        4000,
        [["big", 8000, 1_700_000_000_123_456], ["cats/1", 3, 1_700_000_000_123_457]],
        False,
    ],
}


@pytest.fixture(scope="module")
def trial_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if reason := uml.missing(["smbd", "smbpasswd", "mount.cifs"]):
        pytest.skip(reason)
    return uml.boot(Path(tmp_path_factory.mktemp("uml")), "cifs", *TRIALS)


@pytest.mark.parametrize("trial", ["mounted", *TRIALS])
def test_smb_share(trial_results: dict[str, Any], trial: str) -> None:
    result = trial_results.get(trial, trial_results["all"][-3000:])
    assert result == {"mounted": True, **TRIALS}[trial], result
