"""Whatever a manifest, a state or a metrics file holds: a clear error or the right answer."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # as the first optimizer does; it leaves a variable behind
from safetensors.torch import save_file

from paceline.spec.errors import PacelineError
from paceline.spec.rundir import BEST, MANIFEST, WRITER, read_pointer
from paceline.spec.training.checkpoint_manifest import DamagedCheckpoint, FileEntry, Manifest
from paceline.spec.training.metrics import MAX_LINE_BYTES as MOST_LINE
from paceline.spec.training.metrics import recorded_steps
from paceline.train import files
from paceline.train.checkpoints.capture import Copier, Training, capture
from paceline.train.checkpoints.format import OPTIMIZER, RANDOM, STATE, WEIGHTS, read_manifest
from paceline.train.checkpoints.resume import check_identity, load, restore
from paceline.train.checkpoints.store import Store, WriterLock
from paceline.train.checkpoints.writer import Writer
from paceline.train.comms import Comms
from paceline.train.data.loader import Progress
from paceline.train.files import RecordFile
from paceline.train.models import Models
from paceline.train.update import Updater
from paceline.train.world import World

ALONE = Comms(World(), torch.device("cpu"))
MANIFESTS, STATES, TENSORS, METRICS = 450, 450, 50, 1500
MOST_SECONDS, MOST_BYTES = 5.0, 500 << 20

ODD: list[Any] = [
    *(None, True, -1, 0, 2**63, 10**400, 1e308, float("inf"), float("nan"), "", "0", "a" * 5000),
    *("\0", "../../x", "/etc/passwd", "\x1b]0;x\7", "\ud800", "$tensor", "float32"),
    *([], {}, [[]], [None] * 100, {"": {}}, {"$tensor": "nope"}, {"$tensor": []}, {"$pairs": 3}),
    *({"$pairs": [[1, 2, 3]]}, {"$tuple": "ab"}, {"$pairs": [[{"$pairs": []}, 1]]}),
]
RAW = [
    b"",
    b"{",
    b"[" * 100_000,
    b"\xff\xfe\0",
    b"1" * 5000,
    b"null",
    b'{"a":' * 20_000,
    b"\0" * 99,
]


@pytest.fixture(autouse=True)
def frugal() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown << 10 < MOST_BYTES


def changed(value: Any, draw: random.Random) -> Any:
    """The value with something odd at one or two places of its tree."""
    made = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 2))):
        node, parent, key = made, None, None
        while isinstance(node, (dict, list)) and node and (parent is None or draw.random() < 0.8):
            parent = node
            key = draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
            node = node[key]
        if parent is None:
            return draw.choice(ODD)
        way = draw.random()
        if way < 0.2:
            del parent[key]
        elif way < 0.3 and isinstance(parent, dict):
            parent[draw.choice(["", "x", "../x", "$tensor", "step"])] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(draw.choice(ODD))
    return made


def text(value: Any, draw: random.Random) -> bytes:
    raw = json.dumps(value, indent=1, sort_keys=draw.random() < 0.8).encode()
    if draw.random() < 0.15:
        raw = draw.choice(RAW)
    if draw.random() < 0.1:
        place = draw.randrange(len(raw) + 1)
        raw = raw[:place] + draw.randbytes(draw.randrange(9)) + raw[place + draw.randrange(9) :]
    return raw


def bounded(act: Callable[[], str], found: Counter[str]) -> None:
    started = time.monotonic()
    found[act()] += 1
    assert time.monotonic() - started < MOST_SECONDS


def trained() -> Training:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    adam = torch.optim.AdamW(network.parameters())
    network(torch.randn(4, 3)).sum().backward()
    adam.step()
    schedule = torch.optim.lr_scheduler.StepLR(adam, 3)
    models = Models({"": Updater(network, adam, schedule, None, None)})
    return Training(models, Progress(step=3), 0, {"average": torch.nn.Linear(2, 2)}, {"a": "1"})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A sound one."""
    training = trained()
    taken = capture(training, ALONE, is_best=True)
    Copier().start(taken.tensors, taken.deferred)()
    writer = Writer(Store(tmp_path / "c"), 3)
    writer.start(taken)
    writer.wait()
    assert not writer.outcomes.get().problem
    return tmp_path / "c/3"


def signed(folder: Path) -> None:
    """Makes the manifest fit the files, as somebody who means it would."""
    entries = {}
    for path in folder.iterdir():
        if path.name != MANIFEST:
            content = path.read_bytes()
            entries[path.name] = FileEntry(hashlib.sha256(content).hexdigest(), len(content))
    (folder / MANIFEST).write_bytes(Manifest(3, entries, {"ranks": 1}).encode())


def test_manifests(checkpoint: Path) -> None:
    draw, found = random.Random(1), Counter[str]()
    sound = json.loads((checkpoint / MANIFEST).read_bytes())
    for _ in range(MANIFESTS):
        said = changed(sound, draw)
        if isinstance(said, dict) and draw.random() < 0.6:  # its hash is right
            said.pop("sha256", None)
            bare = json.dumps(said, indent=1, sort_keys=True).encode()
            said["sha256"] = hashlib.sha256(bare).hexdigest()
            raw = json.dumps(said, indent=1, sort_keys=True).encode() + b"\n"
        else:
            raw = text(said, draw)
        (checkpoint / MANIFEST).write_bytes(raw)

        def act() -> str:
            try:
                read_manifest(checkpoint).verify(checkpoint)
            except DamagedCheckpoint as damage:
                return "damaged" if len(str(damage)) < 1000 else "too long"
            return "read"

        bounded(act, found)
    assert found["damaged"] > MANIFESTS / 2
    assert found["too long"] == 0


def resumed(checkpoint: Path, training: Training) -> str:
    try:
        loaded = load(ALONE, str(checkpoint), Store(checkpoint.parent), lambda _: None)
        assert loaded is not None
        check_identity(loaded, training.identity)
        restore(loaded, training, ALONE)
    except PacelineError as error:
        return "refused" if len(error.render()) < 3000 else "too long"
    return "resumed"


def test_states(checkpoint: Path) -> None:
    draw, found = random.Random(2), Counter[str]()
    training = trained()
    assert resumed(checkpoint, training) == "resumed"
    sound = json.loads((checkpoint / STATE).read_bytes())
    for _ in range(STATES):
        (checkpoint / STATE).write_bytes(text(changed(sound, draw), draw))
        signed(checkpoint)
        bounded(lambda: resumed(checkpoint, training), found)
    assert found["refused"] > STATES / 4
    assert found["too long"] == 0


def test_tensors(checkpoint: Path, tmp_path: Path) -> None:
    draw, found = random.Random(3), Counter[str]()
    sound, training = tmp_path / "sound", trained()
    shutil.copytree(checkpoint, sound)
    for _ in range(TENSORS):
        name = draw.choice([WEIGHTS, OPTIMIZER, RANDOM])
        raw = bytearray((sound / name).read_bytes())
        way = draw.random()
        if way < 0.3:
            save_file({"0.weight": torch.zeros(draw.randrange(5))}, checkpoint / name)
        else:
            place = draw.randrange(min(len(raw), 300))
            raw[place : place + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
            (checkpoint / name).write_bytes(raw[: draw.choice([len(raw), 7, 100])])
        signed(checkpoint)
        bounded(lambda: resumed(checkpoint, training), found)
        shutil.copy(sound / name, checkpoint / name)
    assert found["refused"] > TENSORS / 2


def test_metrics(tmp_path: Path) -> None:
    """What is no record does not count; the records around it do."""
    draw, path = random.Random(4), tmp_path / "metrics.jsonl"
    sound = {"time": 1.5, "step": 3, "epoch": 0, "split": "train", "loss": 0.5}
    for number in range(METRICS):
        hostile = text(changed(sound, draw), draw).replace(b"\n", b"")
        if number % 300 == 0:
            hostile *= 3 * MOST_LINE // max(1, len(hostile))
        lines = [b'{"split": "before", "step": 7}', hostile, b'{"split": "after", "step": 8}']
        path.write_bytes(b"\n".join(lines) + b"\n" + hostile[:20])

        def act() -> str:
            last = recorded_steps(path)
            assert (last.get("before"), last.get("after")) == (7, 8)
            assert all(isinstance(split, str) for split in last)
            assert all(type(step) is int and 0 <= step < 2**63 for step in last.values())
            records = RecordFile(path)
            records.skip_recorded()
            records.append({"split": "after", "step": 9})
            assert recorded_steps(path)["after"] == 9
            return ""

        bounded(act, Counter())


def test_links_are_not_written_through(tmp_path: Path) -> None:
    """A run directory may come from a stranger."""
    mine, folder = tmp_path / "bashrc", tmp_path / "run"
    mine.write_text("one\ntwo")
    folder.mkdir()
    for name in ("metrics.jsonl", WRITER, "a.json"):
        (folder / name).symlink_to(mine)
    RecordFile(folder / "metrics.jsonl").append({"split": "train", "step": 1})
    with pytest.raises(OSError):
        WriterLock(folder).acquire()
    files.write_json(folder / "a.json", {})
    assert not (folder / "a.json").is_symlink()
    assert mine.read_text() == "one\ntwo"


def test_pointers(tmp_path: Path) -> None:
    for raw in [*RAW, *(json.dumps({"step": one}).encode() for one in ODD[:8])]:
        (tmp_path / "best.json").write_bytes(raw)
        assert Store(tmp_path).best_of([]) is None
        assert isinstance(read_pointer(tmp_path / BEST), str)


def test_what_starting_again_would_do(tmp_path: Path) -> None:
    """Nobody is promised a resume from a checkpoint that there is not."""
    from paceline.explain.evidence_reader import from_run
    from paceline.explain.rules import load

    (tmp_path / "result.json").write_text('{"interrupted": 2, "exit_code": 130}')
    rule = load("interrupted")
    match = rule.match(from_run(tmp_path))
    assert match is not None
    assert "training starts from step 0" in match.remedy
    assert "files/HOST" in match.remedy  # a script's own
    for step in ("20", "100", "7"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    for step in ("20", "7"):
        (tmp_path / "checkpoints" / step / "manifest.json").write_text("{}")
    match = rule.match(from_run(tmp_path))
    assert match is not None
    assert match.remedy.endswith("training resumes from the checkpoint of step 20.")
