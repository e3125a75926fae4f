"""Tests the text, translation and sft recipes on hosts that share no folder with the launcher."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import tiny_language_model
from hub_folders import bert
from launches import on, paceline

from paceline.lab import Lab
from warm_agents import warm_agents

pytestmark = [pytest.mark.lab, pytest.mark.slow]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    letters = "abcdefgh"
    rows = [[a, b, c] for a in letters for b in letters for c in letters]
    lines = ["\t".join((" ".join(row), " ".join(row[::-1]))) for row in rows]
    (folder / "pairs.tsv").write_text("\n".join(lines))
    texts = [("up" if row < row[::-1] else "down", " ".join(row)) for row in rows]
    (folder / "words").mkdir()
    for part, subset in (("train", texts[:400]), ("test", texts[400:])):
        (folder / "words" / f"{part}.csv").write_text("\n".join(map(",".join, subset)))
    return folder


@pytest.fixture(scope="module")
def two_hosts(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab: Lab = new_lab(hosts=2)
    with warm_agents(tmp_path_factory.mktemp("cache"), *on(lab), "--no-torch"):
        yield lab


def test_translation(two_hosts: Lab, project: Path) -> None:
    flags = ["--data=pairs.tsv", "--model=tiny", "--steps=4", "--lr=4e-3", "--dropout=0"]
    extra_flags = ["--samples=0", "--score-every=99", "--global-batch=16", "--run-dir=reverser"]
    trained = paceline("train", "translation", *on(two_hosts), *flags, *extra_flags, cwd=project)
    assert trained.returncode == 0, trained.stderr[-3000:]
    run = project / "reverser"
    plan = json.loads((run / "plan.json").read_text())
    assert [node["host"] for node in plan["nodes"]] == list(two_hosts.names)
    recorded = json.loads((run / "model/config.json").read_text())["metrics"]["val"]
    assert (run / "translations.jsonl").is_file()
    distributed_eval = paceline("evaluate", "reverser", *on(two_hosts), cwd=project)
    assert f"exact {recorded['exact']:.4f}" in distributed_eval.stdout, distributed_eval.stderr[
        -3000:
    ]


def test_sft(two_hosts: Lab, project: Path) -> None:
    """Model and conversations are only on the launching machine."""
    base = tiny_language_model.save(project / "base")
    tiny_language_model.write_jsonl(project / "chat.jsonl", tiny_language_model.chats(24))
    flags = ["--model=base", "--data=chat.jsonl", "--steps=2", "--sample-tokens=4"]
    extra_flags = ["--lora-rank=4", "--run-dir=chat"]
    trained = paceline("train", "sft", *on(two_hosts), *flags, *extra_flags, cwd=project)
    assert trained.returncode == 0, trained.stderr[-3000:]
    run = project / "chat"
    assert json.loads((run / "model/config.json").read_text())["model"] == str(base)
    adapter = json.loads((run / "adapters/best/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(base)
    assert (run / "adapters/last/adapter_model.safetensors").is_file()
    assert (run / "samples.jsonl").is_file()
    local_eval = paceline("evaluate", "chat", cwd=project)
    loss, bits = local_eval.stdout.split("  bits per byte ")
    assert loss in trained.stdout, local_eval.stderr
    assert float(bits.split()[0]) > 0
    distributed_eval = paceline("evaluate", "chat", *on(two_hosts), cwd=project)
    assert loss in distributed_eval.stdout, distributed_eval.stderr[-3000:]


def test_text(two_hosts: Lab, project: Path) -> None:
    """The data are in a folder that only the launching machine has."""
    flags = ["--data=words", "--steps=10", "--run-dir=texts"]
    trained = paceline("train", "text", *on(two_hosts), *flags, cwd=project)
    assert trained.returncode == 0, trained.stderr[-3000:]
    names = sorted(path.name for path in (project / "texts").rglob("*"))
    assert "tokenizer.json" in names, (names, trained.stderr)
    assert "sending data" in trained.stderr
    local_eval = paceline("evaluate", "texts", cwd=project)
    assert local_eval.stdout.split("  (")[0] in trained.stdout, local_eval.stderr
    distributed_eval = paceline("evaluate", "texts", *on(two_hosts), cwd=project)
    assert local_eval.stdout.split("  (")[0] in distributed_eval.stdout, distributed_eval.stderr
    assert "sending data" not in distributed_eval.stderr  # the hosts have the data already


def test_model_folder_of_text_classifier(two_hosts: Lab, project: Path) -> None:
    """Only the launching machine has the model, and the run to resume from."""
    bert(project / "bert")
    flags = ["--data=words", "--model=./bert", "--max-length=8", "--no-fast"]
    for steps, extra_flags in ((1, ["--run-dir=first"]), (2, ["--resume=first"])):
        trained = paceline(
            "train", "text", *on(two_hosts), *flags, f"--steps={steps}", *extra_flags, cwd=project
        )
        assert trained.returncode == 0, trained.stderr[-3000:]
    assert "resumed after step 1 from" in trained.stdout
