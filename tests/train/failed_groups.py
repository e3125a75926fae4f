"""Forms a group that fails and then another one, on two forked ranks."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked_worlds
import torch
import torch.distributed as dist

from paceline.train.comms import Comms
from paceline.train.elastic import job_group
from paceline.train.elastic.connections import GlooConnections
from paceline.train.elastic.control import RegroupMessage
from paceline.train.elastic.job_group import JobGroup, Superseded
from paceline.train.elastic.recovery import Recovery
from paceline.train.world import World, read

TRAINING: Any = SimpleNamespace(step=0, event=lambda *_, **__: None)


class Said:
    """Holds the launcher's message, as :class:`paceline.train.elastic.control.Control` does."""

    word: RegroupMessage | None = None

    def newer(self, generation: int) -> RegroupMessage | None:
        word = self.word
        return word if word is not None and word.generation > generation else None


class Later(Said):
    """Has no message at the first request."""

    def __init__(self) -> None:
        self._asked = 0

    def newer(self, generation: int) -> RegroupMessage | None:
        self._asked += 1
        return None if self._asked == 1 else super().newer(generation)


def make(store: Any, place: World, longest: timedelta) -> None:
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.size, timeout=longest
    )


def body(folder: Path) -> None:
    torch.set_num_threads(1)
    job_group._FORMING = timedelta(seconds=2)
    dist.init_process_group("gloo")
    place, control = read(os.environ), Later()
    comms = Comms(place, torch.device("cpu"))
    own: Any = control
    one = Recovery(place.rank, comms, own, JobGroup(own, GlooConnections(), make))
    one.training = TRAINING
    port = int(os.environ["MASTER_PORT"])
    members = tuple((slot, "n1", slot, 2) for slot in range(2))
    words = [RegroupMessage(number, members, "127.0.0.1", port, False) for number in (1, 2)]
    if not place.rank:
        control.word = words[1]  # arrives before this rank knows that all ranks are there
    failed, first = "", folder / "first"
    while place.rank and not first.exists():
        time.sleep(0.01)
    try:
        one._form(words[0])
    except RuntimeError as error:
        failed = type(error).__name__ if isinstance(error, Superseded) else "not made"
    first.touch()
    one._form(words[1])
    rows = comms.rows(torch.tensor([place.rank])).tolist()
    (folder / f"{place.rank}.json").write_text(json.dumps([failed, rows]))


def main(folder: Path) -> None:
    forked_worlds.run_ok(2, lambda: body(folder), {"TORCHELASTIC_USE_AGENT_STORE": "False"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
