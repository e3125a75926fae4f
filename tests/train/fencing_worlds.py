"""Stops and continues two forked writers of a folder of checkpoints at random moments."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from paceline.spec.rundir import BEST, LATEST, parse_version, read_pointer
from paceline.spec.training.checkpoint_manifest import DamagedCheckpoint, FileEntry, Manifest
from paceline.train.checkpoints.format import write_chunks
from paceline.train.checkpoints.store import Fenced, Store

FENCED, KEEP, STEPS = 3, 2, 6
MOMENT = 0.012  # seconds; a checkpoint takes a few milliseconds


def make(store: Store, step: int) -> None:
    made = store.temporary(step)
    content = f"{store.token} {step}".encode() * 2000
    entries = {
        name: FileEntry(*write_chunks(made / name, iter([content])))
        for name in ("weights.safetensors", "state.json")
    }
    store.publish(made, Manifest(step, entries, {"best": step % 5 == 0}))
    store.prune(KEEP)


def newest_intact(root: Path) -> tuple[int, str]:
    """Returns how many of the newest checkpoints are damaged, and the newest intact one."""
    found, _ = Store(root).scan()
    for place, one in enumerate(found):
        try:
            one.manifest.verify(one.path)
        except DamagedCheckpoint:
            continue
        return place, one.path.name
    return len(found), ""


class Hesitant(Store):
    """Waits between the check of the token and the renaming, so that it is often stopped there."""

    def check_not_fenced(self) -> None:
        super().check_not_fenced()
        time.sleep(random.random() * MOMENT)


def first(root: Path) -> int:
    """Writes checkpoints until another writer takes over."""
    store = Hesitant(root) if random.random() < 0.7 else Store(root)
    store.claim_token(0, "the first")
    try:
        for step in range(1, 2000):
            make(store, step)
            if store.highest_token() > store.token:  # at most the last write
                (root.parent / "late").touch()
    except (Fenced, OSError):
        try:
            store.check_not_fenced()
        except Fenced:
            return FENCED
    return 1


def second(root: Path) -> int:
    """Takes over as writer, resumes from what there is, and writes a few checkpoints."""
    store = Store(root)
    store.claim_token(0, "the second")
    known = {one.path.name for one in store.scan()[0]}
    passed, name = newest_intact(root)
    assert passed <= 1, (passed, name)
    (root.parent / "known.json").write_text(json.dumps(sorted(known)))
    version = parse_version(name)
    assert version is not None
    for step in range(version[1] + 1, version[1] + 1 + STEPS):
        make(store, step)
        assert newest_intact(root) == (0, f"{step}.{store.token}")
        time.sleep(random.random() * MOMENT / 4)
    return 0


def forked(body: object, root: Path, seed: int) -> int:
    pid = os.fork()
    if not pid:
        status = 70
        try:
            random.seed(seed)
            status = body(root)  # type: ignore[operator]
        except BaseException as error:
            print(f"{root}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def one_case(root: Path, draw: random.Random, seen: Counter[str]) -> None:
    old = forked(first, root, draw.randrange(1 << 30))
    while not (root / LATEST).exists():
        time.sleep(0.001)
    time.sleep(draw.random() * MOMENT)
    os.kill(old, signal.SIGSTOP)
    new = forked(second, root, draw.randrange(1 << 30))
    killed = draw.random() < 0.2
    waits = draw.random() < 0.3  # until the second writer has ended
    if waits:
        ended = status_of(new)
    for _ in range(draw.randrange(3)):
        time.sleep(draw.random() * MOMENT)
        os.kill(old, signal.SIGCONT)
        time.sleep(draw.random() * MOMENT / 10)
        os.kill(old, signal.SIGSTOP)
    time.sleep(draw.random() * MOMENT)
    os.kill(old, signal.SIGKILL if killed else signal.SIGCONT)
    left = status_of(old)
    if not waits:
        ended = status_of(new)
    assert ended == 0, ended
    assert left in (FENCED, -signal.SIGKILL), left
    passed, name = newest_intact(root)
    version = parse_version(name)
    assert passed == 0, name
    assert version is not None
    assert version[0] == 2
    known = set(json.loads((root.parent / "known.json").read_text()))
    late = {one.path.name for one in Store(root).scan()[0] if one.version[0] == 1} - known
    assert len(late) <= 1, late  # the checkpoint that it was renaming
    third = Store(root)
    third.claim_token(0, "the third")
    make(third, version[1] + 5 - version[1] % 5)  # next best: both pointers are valid again
    assert read_pointer(root / LATEST) == read_pointer(root / BEST) == newest_intact(root)[1]
    seen["late"] += (root.parent / "late").exists()
    seen["fenced" if left == FENCED else "killed"] += 1


def main() -> None:
    folder, cases, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draw, seen = random.Random(seed), Counter[str]()
    for case in range(cases):
        place = folder / str(case)
        place.mkdir()
        try:
            one_case(place / "checkpoints", draw, seen)
        except AssertionError as error:
            raise AssertionError(f"case {case} of seed {seed}") from error
        shutil.rmtree(place)
        seen["cases"] += 1
    (folder / "found.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
