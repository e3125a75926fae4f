"""Functions of this process as ranks on hosts that share nothing: values, errors, places, ends."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from launches import Site, eventually, project_at

import paceline
from paceline import RankError

pytestmark = pytest.mark.lab
HELPER = "WORD = 'shipped'\n\ndef word(): return WORD, __file__\n"


@pytest.fixture(scope="module")
def apart(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The hosts do not see the project."""
    folder = tmp_path_factory.mktemp("apart")
    site = Site(new_lab(hosts=2), project_at(folder / "project"))
    (site.project / "helper_of_the_project.py").write_text(HELPER)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "helper_elsewhere.py").write_text(HELPER.replace("shipped", "carried"))
    yield site
    assert site.leftovers() == ""


@pytest.fixture
def there(apart: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What ``launch`` is told of the hosts; the current folder is the project."""
    monkeypatch.chdir(apart.project)
    for folder in (apart.project, apart.project.parent / "elsewhere"):
        monkeypatch.syspath_prepend(str(folder))
    yield {"hosts": str(apart.lab.hostfile), "ssh_config": apart.lab.ssh_config, "show": "none"}
    assert not list(apart.project.glob("runs/*/call"))
    assert not list(apart.project.glob("runs/*/returned"))


@dataclasses.dataclass
class Answer:
    rank: int
    sum: torch.Tensor
    large: torch.Tensor
    array: Any
    words: tuple[Any, ...]
    pickler: str


class OddError(ValueError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one


def rank() -> int:
    return int(os.environ["RANK"])


def test_values_come_back_by_rank_from_hosts_that_share_nothing(
    there: dict[str, Any], apart: Site
) -> None:
    project: Any = importlib.import_module("helper_of_the_project")
    elsewhere: Any = importlib.import_module("helper_elsewhere")
    offset = 100

    def work(scale: int, *, size: int) -> Answer:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(rank())], dtype=torch.bfloat16) * scale
        dist.all_reduce(total)
        dist.destroy_process_group()
        large = torch.full((size,), offset + rank()).reshape(2, -1).T
        pickler = str(sys.modules["cloudpickle"].__file__)
        words = (project.word(), elsewhere.word())
        return Answer(rank(), total, large, numpy.full(size, rank()), words, pickler)

    try:
        found = paceline.launch(work, (10,), {"size": 1 << 20}, nproc_per_node=2, **there)
    finally:
        for name in ("helper_of_the_project", "helper_elsewhere"):
            sys.modules.pop(name)
    assert [answer.rank for answer in found] == [0, 1, 2, 3]
    assert list(found.by_host) == ["n1", "n2"]
    assert found.by_host["n2"] == found[2:]
    for answer in found:
        assert type(answer) is Answer
        assert answer.sum.tolist() == [60.0]
        assert answer.sum.dtype == torch.bfloat16
        assert answer.large.shape == (1 << 19, 2)
        assert answer.large.unique().tolist() == [100 + answer.rank]
        assert answer.array.tolist()[:2] == [answer.rank] * 2
        assert answer.words[0][0] == "shipped"
        assert answer.words[0][1] != str(apart.project / "helper_of_the_project.py")
        assert answer.words[1][0] == "carried"
        assert answer.pickler == "<cloudpickle>"


def test_the_first_failing_ranks_own_exception_is_raised(there: dict[str, Any]) -> None:
    def fail() -> None:
        if rank() == 1:
            raise OddError(1, 2)
        time.sleep(30)

    with pytest.raises(OddError, match="1 and 2") as raised:
        paceline.launch(fail, torch=False, **there)
    assert raised.value.one == 1
    cause = raised.value.__cause__
    assert isinstance(cause, RankError)
    assert (cause.host, cause.rank) == ("n2", 1)
    assert "raise OddError(1, 2)" in cause.traceback
    assert "agent" not in cause.traceback
    assert (cause.outcome.path / "logs" / "n2" / "1.log").exists()


def test_a_rank_that_ends_otherwise_is_told_of(there: dict[str, Any]) -> None:
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="SIGKILL") as raised:
        paceline.launch(kill, torch=False, **there)
    assert raised.value.exit_code == 137
    with pytest.raises(RankError, match="ended without returning"):
        paceline.launch(sys.exit, torch=False, **there)
    with pytest.raises(TypeError, match=r"what rank . returned\['it'\] is a generator"):
        paceline.launch(lambda: {"it": (x for x in ())}, torch=False, **there)


def test_no_file_is_sent_where_none_is_wanted(there: dict[str, Any], apart: Site) -> None:
    project: Any = importlib.import_module("helper_of_the_project")
    try:
        found = paceline.launch(lambda: project.word()[0], torch=False, ship=False, **there)
    finally:
        sys.modules.pop("helper_of_the_project")
    assert list(found) == ["shipped", "shipped"]
    assert "shipped" not in (found.outcome.path / "plan.json").read_text()


def test_several_threads_launch_at_once(there: dict[str, Any]) -> None:
    async def both() -> list[Any]:
        calls = [asyncio.to_thread(paceline.launch, int, (n,), torch=False, **there)
                 for n in (1, 2)]  # fmt: skip
        return await asyncio.gather(*calls)

    assert [list(one) for one in asyncio.run(both())] == [[1, 1], [2, 2]]


def test_ctrl_c_beside_a_running_loop_ends_all_ranks(there: dict[str, Any], apart: Site) -> None:
    """As in a notebook, whose cells run inside of an event loop."""

    async def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            paceline.launch(time.sleep, (60,), torch=False, **there)

    def interrupt() -> None:
        eventually(lambda: bool(_started(apart.project)))
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        asyncio.run(cell())
    finally:
        helper.join()


def _started(project: Path) -> bool:
    files = project.glob("runs/sleep-*/events.jsonl")
    return any('"started"' in file.read_text() for file in files)
