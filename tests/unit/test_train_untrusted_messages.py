"""Tests that no path, size or type in a message of another rank is used unchecked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.spec.errors import JobError
from paceline.spec.schema import integer, text, tuple_of
from paceline.train import comms as ranks
from paceline.train.checkpoints import handover, resume
from paceline.train.checkpoints.store import Store
from paceline.train.comms import Comms, parse_texts
from paceline.train.data import disks
from paceline.train.elastic.recovery import _broadcast_result


class FakeComms:
    """Two ranks; the other one sends what the test provides."""

    is_alone = joining = False
    fault_handler = None

    def __init__(self, *other: str, rank: int = 0) -> None:
        self.world = SimpleNamespace(rank=rank, size=2, local_rank=0, host="n1")
        self._other = [*other]

    def texts(self, mine: str) -> list[str]:
        said = [mine, self._other.pop(0)]
        return said if self.world.rank == 0 else said[::-1]

    def together(self, act: Any) -> Any:
        return act()

    def rows(self, vector: torch.Tensor) -> torch.Tensor:
        return torch.stack([vector, vector])

    def barrier(self) -> None:
        pass

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        pass


def said(*other: str, rank: int = 0) -> Comms:
    return cast(Comms, FakeComms(*other, rank=rank))


@pytest.mark.parametrize("name", ["{}", "../thesis", ".paceline-../thesis", ".paceline-1/../../x"])
def test_marker_name_of_rank_cannot_remove_files(tmp_path: Path, name: str) -> None:
    """The other rank names its marker so, and is lost; then its incomplete files are removed."""
    thesis = tmp_path / "thesis"
    thesis.write_text("mine")
    (tmp_path / ".cache.x.tmp").mkdir()
    name, markers = name.replace("{}", str(thesis)), list[str]()
    for _ in range(2):
        comms = said(name, "", "")
        disks._try_make(comms, tmp_path / "data" / "cache", lambda folder: None, markers)
    assert thesis.read_text() == "mine"
    assert markers == [marker for marker in markers if disks._MARKER.fullmatch(marker)]
    assert not any(name in marker for marker in markers)


def test_does_not_probe_path_of_rank(tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    comms = said(str(tmp_path / "secret"), rank=1)
    assert disks.visible_ranks(comms, tmp_path, owner=0) == [False, False]


@pytest.mark.parametrize(
    "name",
    [
        "/tmp",
        "{}/run/checkpoints",
        "{}/run/checkpoints/10",
        "{}/run/checkpoints/../.10.1.7.tmp",
        "{}/.10.1.7.tmp",
    ],
)
def test_rejects_shard_folder_outside_checkpoints(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / "run" / "checkpoints")
    temporary_folder = store.temporary(10)
    (tmp_path / ".10.1.7.tmp").mkdir()
    (tmp_path / "run" / ".10.1.7.tmp").mkdir()
    store.check_temporary(temporary_folder)
    with pytest.raises(JobError, match="is no place for a checkpoint"):
        store.check_temporary(Path(name.format(tmp_path)))


@pytest.mark.parametrize("message", [
    "[", "{}", "null", '["a"]', "[1, 2]", '["a", -1]', '["a", 1e400]', "[" * 100_000,
    '["a", ' + "9" * 4000 + "]",
])  # fmt: skip
def test_malformed_message_error_names_rank(message: str) -> None:
    with pytest.raises(JobError, match="rank 1 sent what no rank of this program sends"):
        parse_texts(['["n1", 3]', message], tuple_of(text(), integer()))


@pytest.mark.parametrize("length", [1 << 40, (1 << 64) - 1])
def test_rejects_excessive_text_length(length: int) -> None:
    announced = torch.tensor([*length.to_bytes(8, "little"), *bytes(504)], dtype=torch.uint8)
    with pytest.raises(JobError, match="announced a text of"):
        ranks._parse_first_message(announced)


@pytest.mark.parametrize("result", [[[1 << 70], "float32", None], [[2], "nn", None],
                                    [[2], "load", None], [[-2], "float32", None], ["x", "", 0],
                                    [[2], "__class__", None], []])  # fmt: skip
def test_rejects_malformed_result_of_rank(result: Any) -> None:
    with pytest.raises(JobError, match="sent what no rank of this program sends"):
        _broadcast_result(said(json.dumps(result)), 1, None)


@pytest.mark.parametrize("shapes", [{"f": {"t": ["load", [2]]}}, {"f": {"t": ["float32", [-1]]}},
                                    {"f": {"t": ["float32"]}}, {"f": 3}, [1]])  # fmt: skip
def test_rejects_malformed_checkpoint_shapes(shapes: Any) -> None:
    with pytest.raises(JobError, match="rank 1 sent"):
        resume._share_tensors(said(json.dumps(shapes)), 1, {})


@pytest.mark.parametrize("head", [
    [], {"problem": "", "state": {}, "source": "s"},
    {"problem": "", "state": {"progress": {"step": "x"}}, "source": "s", "host": "h"},
])  # fmt: skip
def test_rejects_malformed_state_header(head: Any) -> None:
    with pytest.raises(JobError, match="rank 1 sent"):
        resume._load_from(said(json.dumps(head)), 1, None, sharded=False)


@pytest.mark.parametrize("head", [[], {"tensors": 3}, {"tensors": {"w": ["nn", [2]]}}, {"x": 1},
                                  {"tensors": {"w": ["float32", [-1]]}}])  # fmt: skip
def test_rejects_malformed_handover_header(head: Any) -> None:
    with pytest.raises(JobError, match="rank 2 sent"):
        handover._received_header(json.dumps(head), 2)


def test_accepts_valid_handover_header() -> None:
    head = {"training": {"any": [1]}, "tensors": {"w": ["float32", [2, 3]], "s": ["int64", []]}}
    assert handover._received_header(json.dumps(head), 1) == head
    assert handover._received_header("{}", 1) == {}


def test_marker_of_rank_matches_pattern(tmp_path: Path) -> None:
    names, mine, makers = disks._elect_makers(said("", ""), tmp_path)
    assert disks._MARKER.fullmatch(mine)
    assert (names, makers) == ([mine, ""], {mine})
    assert not [*tmp_path.iterdir()]
