"""Tests that damaged manifests, states and metrics give a clear error or a correct result."""

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
import torch._dynamo  # as the first optimizer does; this import sets a variable
from safetensors.torch import save_file

from paceline.spec.errors import PacelineError
from paceline.spec.rundir import BEST, MANIFEST, WRITER, read_pointer
from paceline.spec.training.checkpoint_manifest import DamagedCheckpoint, FileEntry, Manifest
from paceline.spec.training.metrics import MAX_LINE_BYTES as MAX_LINE_SIZE
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

SINGLE_RANK_COMMS = Comms(World(), torch.device("cpu"))
MANIFESTS, STATES, TENSORS, METRICS = 450, 450, 50, 1500
MAX_SECONDS, MAX_BYTES = 5.0, 500 << 20

INVALID_VALUES: list[Any] = [
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
def limit_memory() -> Iterator[None]:
    initial_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - initial_rss
    assert grown << 10 < MAX_BYTES


def mutate(value: Any, draw: random.Random) -> Any:
    """Returns a copy of the value with an unusual element at one or two places."""
    mutated = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 2))):
        node, parent, key = mutated, None, None
        while isinstance(node, (dict, list)) and node and (parent is None or draw.random() < 0.8):
            parent = node
            key = draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
            node = node[key]
        if parent is None:
            return draw.choice(INVALID_VALUES)
        probability = draw.random()
        if probability < 0.2:
            del parent[key]
        elif probability < 0.3 and isinstance(parent, dict):
            parent[draw.choice(["", "x", "../x", "$tensor", "step"])] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(draw.choice(INVALID_VALUES))
    return mutated


def serialize(value: Any, draw: random.Random) -> bytes:
    raw = json.dumps(value, indent=1, sort_keys=draw.random() < 0.8).encode()
    if draw.random() < 0.15:
        raw = draw.choice(RAW)
    if draw.random() < 0.1:
        offset = draw.randrange(len(raw) + 1)
        raw = raw[:offset] + draw.randbytes(draw.randrange(9)) + raw[offset + draw.randrange(9) :]
    return raw


def run_within_limit(attempt: Callable[[], str], tally: Counter[str]) -> None:
    start_time = time.monotonic()
    tally[attempt()] += 1
    assert time.monotonic() - start_time < MAX_SECONDS


def make_training() -> Training:
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
    """Writes a valid checkpoint and returns its folder."""
    training = make_training()
    captured = capture(training, SINGLE_RANK_COMMS, is_best=True)
    Copier().start(captured.tensors, captured.deferred)()
    writer = Writer(Store(tmp_path / "c"), 3)
    writer.start(captured)
    writer.wait()
    assert not writer.outcomes.get().problem
    return tmp_path / "c/3"


def rewrite_manifest(folder: Path) -> None:
    """Rewrites the manifest to match the changed files, as an attacker would."""
    entries = {}
    for path in folder.iterdir():
        if path.name != MANIFEST:
            content = path.read_bytes()
            entries[path.name] = FileEntry(hashlib.sha256(content).hexdigest(), len(content))
    (folder / MANIFEST).write_bytes(Manifest(3, entries, {"ranks": 1}).encode())


def test_mutated_manifests_are_read_or_rejected(checkpoint: Path) -> None:
    draw, tally = random.Random(1), Counter[str]()
    valid = json.loads((checkpoint / MANIFEST).read_bytes())
    for _ in range(MANIFESTS):
        mutant = mutate(valid, draw)
        if isinstance(mutant, dict) and draw.random() < 0.6:  # makes its hash valid
            mutant.pop("sha256", None)
            unsigned = json.dumps(mutant, indent=1, sort_keys=True).encode()
            mutant["sha256"] = hashlib.sha256(unsigned).hexdigest()
            raw = json.dumps(mutant, indent=1, sort_keys=True).encode() + b"\n"
        else:
            raw = serialize(mutant, draw)
        (checkpoint / MANIFEST).write_bytes(raw)

        def attempt() -> str:
            try:
                read_manifest(checkpoint).verify(checkpoint)
            except DamagedCheckpoint as damage:
                return "damaged" if len(str(damage)) < 1000 else "too long"
            return "read"

        run_within_limit(attempt, tally)
    assert tally["damaged"] > MANIFESTS / 2
    assert tally["too long"] == 0


def try_resume(checkpoint: Path, training: Training) -> str:
    try:
        loaded = load(SINGLE_RANK_COMMS, str(checkpoint), Store(checkpoint.parent), lambda _: None)
        assert loaded is not None
        check_identity(loaded, training.identity)
        restore(loaded, training, SINGLE_RANK_COMMS)
    except PacelineError as error:
        return "refused" if len(error.render()) < 3000 else "too long"
    return "resumed"


def test_mutated_states_are_resumed_or_rejected(checkpoint: Path) -> None:
    draw, tally = random.Random(2), Counter[str]()
    training = make_training()
    assert try_resume(checkpoint, training) == "resumed"
    valid = json.loads((checkpoint / STATE).read_bytes())
    for _ in range(STATES):
        (checkpoint / STATE).write_bytes(serialize(mutate(valid, draw), draw))
        rewrite_manifest(checkpoint)
        run_within_limit(lambda: try_resume(checkpoint, training), tally)
    assert tally["refused"] > STATES / 4
    assert tally["too long"] == 0


def test_mutated_tensors_are_resumed_or_rejected(checkpoint: Path, tmp_path: Path) -> None:
    draw, tally = random.Random(3), Counter[str]()
    valid, training = tmp_path / "sound", make_training()
    shutil.copytree(checkpoint, valid)
    for _ in range(TENSORS):
        name = draw.choice([WEIGHTS, OPTIMIZER, RANDOM])
        raw = bytearray((valid / name).read_bytes())
        probability = draw.random()
        if probability < 0.3:
            save_file({"0.weight": torch.zeros(draw.randrange(5))}, checkpoint / name)
        else:
            offset = draw.randrange(min(len(raw), 300))
            raw[offset : offset + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
            (checkpoint / name).write_bytes(raw[: draw.choice([len(raw), 7, 100])])
        rewrite_manifest(checkpoint)
        run_within_limit(lambda: try_resume(checkpoint, training), tally)
        shutil.copy(valid / name, checkpoint / name)
    assert tally["refused"] > TENSORS / 2


def test_mutated_metrics_lines_are_skipped(tmp_path: Path) -> None:
    """Invalid lines are ignored; the records around them are read."""
    draw, path = random.Random(4), tmp_path / "metrics.jsonl"
    valid = {"time": 1.5, "step": 3, "epoch": 0, "split": "train", "loss": 0.5}
    for number in range(METRICS):
        hostile = serialize(mutate(valid, draw), draw).replace(b"\n", b"")
        if number % 300 == 0:
            hostile *= 3 * MAX_LINE_SIZE // max(1, len(hostile))
        lines = [b'{"split": "before", "step": 7}', hostile, b'{"split": "after", "step": 8}']
        path.write_bytes(b"\n".join(lines) + b"\n" + hostile[:20])

        def attempt() -> str:
            recorded = recorded_steps(path)
            assert (recorded.get("before"), recorded.get("after")) == (7, 8)
            assert all(isinstance(split, str) for split in recorded)
            assert all(type(step) is int and 0 <= step < 2**63 for step in recorded.values())
            records = RecordFile(path)
            records.skip_recorded()
            records.append({"split": "after", "step": 9})
            assert recorded_steps(path)["after"] == 9
            return ""

        run_within_limit(attempt, Counter())


def test_writes_do_not_follow_symlinks(tmp_path: Path) -> None:
    """A run directory may come from somebody else."""
    target, folder = tmp_path / "bashrc", tmp_path / "run"
    target.write_text("one\ntwo")
    folder.mkdir()
    for name in ("metrics.jsonl", WRITER, "a.json"):
        (folder / name).symlink_to(target)
    RecordFile(folder / "metrics.jsonl").append({"split": "train", "step": 1})
    with pytest.raises(OSError):
        WriterLock(folder).acquire()
    files.write_json(folder / "a.json", {})
    assert not (folder / "a.json").is_symlink()
    assert target.read_text() == "one\ntwo"


def test_invalid_pointers_are_ignored(tmp_path: Path) -> None:
    for raw in [*RAW, *(json.dumps({"step": invalid}).encode() for invalid in INVALID_VALUES[:8])]:
        (tmp_path / "best.json").write_bytes(raw)
        assert Store(tmp_path).best_of([]) is None
        assert isinstance(read_pointer(tmp_path / BEST), str)


def test_interrupt_remedy_names_resume_step(tmp_path: Path) -> None:
    """The remedy promises no resume from a checkpoint that does not exist."""
    from paceline.explain.evidence_reader import from_run
    from paceline.explain.rules import load

    (tmp_path / "result.json").write_text('{"interrupted": 2, "exit_code": 130}')
    rule = load("interrupted")
    match = rule.match(from_run(tmp_path))
    assert match is not None
    assert "training starts from step 0" in match.remedy
    assert "files/HOST" in match.remedy  # checkpoints of a script
    for step in ("20", "100", "7"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    for step in ("20", "7"):
        (tmp_path / "checkpoints" / step / "manifest.json").write_text("{}")
    match = rule.match(from_run(tmp_path))
    assert match is not None
    assert match.remedy.endswith("training resumes from the checkpoint of step 20.")
