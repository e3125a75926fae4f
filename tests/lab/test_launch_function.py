"""Tests functions of this process as ranks on other hosts: values, errors, paths and exits."""

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
def isolated_site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The hosts do not see the project."""
    folder = tmp_path_factory.mktemp("apart")
    site = Site(new_lab(hosts=2), project_at(folder / "project"))
    (site.project / "helper_of_the_project.py").write_text(HELPER)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "helper_elsewhere.py").write_text(HELPER.replace("shipped", "carried"))
    yield site
    assert site.leftovers() == ""


@pytest.fixture
def launch_options(
    isolated_site: Site, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """Yields the arguments of ``launch`` that name the hosts; the current folder is the project."""
    monkeypatch.chdir(isolated_site.project)
    for folder in (isolated_site.project, isolated_site.project.parent / "elsewhere"):
        monkeypatch.syspath_prepend(str(folder))
    yield {
        "hosts": str(isolated_site.lab.hostfile),
        "ssh_config": isolated_site.lab.ssh_config,
        "show": "none",
    }
    assert not list(isolated_site.project.glob("runs/*/call"))
    assert not list(isolated_site.project.glob("runs/*/returned"))


@dataclasses.dataclass
class Answer:
    rank: int
    sum: torch.Tensor
    large: torch.Tensor
    array: Any
    words: tuple[Any, ...]
    pickler: str


class TwoArgumentError(ValueError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one


def rank() -> int:
    return int(os.environ["RANK"])


def test_returns_values_by_rank_without_shared_folder(
    launch_options: dict[str, Any], isolated_site: Site
) -> None:
    project: Any = importlib.import_module("helper_of_the_project")
    path_helper: Any = importlib.import_module("helper_elsewhere")
    offset = 100

    def work(scale: int, *, size: int) -> Answer:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(rank())], dtype=torch.bfloat16) * scale
        dist.all_reduce(total)
        dist.destroy_process_group()
        large = torch.full((size,), offset + rank()).reshape(2, -1).T
        pickler = str(sys.modules["cloudpickle"].__file__)
        words = (project.word(), path_helper.word())
        return Answer(rank(), total, large, numpy.full(size, rank()), words, pickler)

    try:
        results = paceline.launch(
            work, (10,), {"size": 1 << 20}, nproc_per_node=2, **launch_options
        )
    finally:
        for name in ("helper_of_the_project", "helper_elsewhere"):
            sys.modules.pop(name)
    assert [answer.rank for answer in results] == [0, 1, 2, 3]
    assert list(results.by_host) == ["n1", "n2"]
    assert results.by_host["n2"] == results[2:]
    for answer in results:
        assert type(answer) is Answer
        assert answer.sum.tolist() == [60.0]
        assert answer.sum.dtype == torch.bfloat16
        assert answer.large.shape == (1 << 19, 2)
        assert answer.large.unique().tolist() == [100 + answer.rank]
        assert answer.array.tolist()[:2] == [answer.rank] * 2
        assert answer.words[0][0] == "shipped"
        assert answer.words[0][1] != str(isolated_site.project / "helper_of_the_project.py")
        assert answer.words[1][0] == "carried"
        assert answer.pickler == "<cloudpickle>"


def test_raises_exception_of_first_failed_rank(launch_options: dict[str, Any]) -> None:
    def fail() -> None:
        if rank() == 1:
            raise TwoArgumentError(1, 2)
        time.sleep(30)

    with pytest.raises(TwoArgumentError, match="1 and 2") as raised:
        paceline.launch(fail, torch=False, **launch_options)
    assert raised.value.one == 1
    cause = raised.value.__cause__
    assert isinstance(cause, RankError)
    assert (cause.host, cause.rank) == ("n2", 1)
    assert "raise TwoArgumentError(1, 2)" in cause.traceback
    assert "agent" not in cause.traceback
    assert (cause.outcome.path / "logs" / "n2" / "1.log").exists()


def test_reports_killed_exited_or_unpicklable_rank(launch_options: dict[str, Any]) -> None:
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="SIGKILL") as raised:
        paceline.launch(kill, torch=False, **launch_options)
    assert raised.value.exit_code == 137
    with pytest.raises(RankError, match="ended without returning"):
        paceline.launch(sys.exit, torch=False, **launch_options)
    with pytest.raises(TypeError, match=r"what rank . returned\['it'\] is a generator"):
        paceline.launch(lambda: {"it": (x for x in ())}, torch=False, **launch_options)


def test_ship_false_sends_no_file(launch_options: dict[str, Any], isolated_site: Site) -> None:
    project: Any = importlib.import_module("helper_of_the_project")
    try:
        results = paceline.launch(
            lambda: project.word()[0], torch=False, ship=False, **launch_options
        )
    finally:
        sys.modules.pop("helper_of_the_project")
    assert list(results) == ["shipped", "shipped"]
    assert "shipped" not in (results.outcome.path / "plan.json").read_text()


def test_threads_launch_concurrently(launch_options: dict[str, Any]) -> None:
    async def launch_both() -> list[Any]:
        calls = [asyncio.to_thread(paceline.launch, int, (n,), torch=False, **launch_options)
                 for n in (1, 2)]  # fmt: skip
        return await asyncio.gather(*calls)

    assert [list(one) for one in asyncio.run(launch_both())] == [[1, 1], [2, 2]]


def test_ctrl_c_in_event_loop_ends_ranks(
    launch_options: dict[str, Any], isolated_site: Site
) -> None:
    """As in a notebook, whose cells run inside an event loop."""

    async def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            paceline.launch(time.sleep, (60,), torch=False, **launch_options)

    def interrupt() -> None:
        eventually(lambda: bool(_started(isolated_site.project)))
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
