"""Tests that a training with a full disk on rank 0's host finishes and its model is fetched."""

from __future__ import annotations

from typing import Any

import pytest
from launches import Site, shared_site

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return shared_site(new_lab, tmp_path_factory.mktemp("full"), hosts=2)


def test_full_disk_stops_checkpoints_but_not_training(site: Site) -> None:
    runs = f"{site.lab.home_inside()}/.cache/paceline/runs"

    def on_n1(text: str) -> None:
        site.lab.exec("n1", ["sh", "-c", text], check=True)

    on_n1(f"mkdir -p {runs} && mount -t tmpfs -o size=4m,mode=700 none {runs}")
    with site.start("steps.py", "60") as launch:
        launch.wait_for("from ", times=2)
        on_n1(f"cat /dev/zero > {runs}/filler || true")
        ended = launch.end(40)
    assert ended.code == 0, ended.err
    assert ended.out.count("the training continues without checkpoints") == 1
    assert "the model was fetched from" in ended.err
    assert (ended.directory / "model" / "model.safetensors").stat().st_size > 30
    on_n1("rm -rf /tmp/paceline-model-*")
