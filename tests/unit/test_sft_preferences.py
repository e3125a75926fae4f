"""Tests preference training: formats of pairs, tokens, the DPO loss, and the cached reference."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_language_model
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipe_tools import config, hub_variables, one_thread, records  # noqa: F401 - fixtures

from command_lines import overridden
from each_case import each_case
from paceline.recipes.language import references
from paceline.recipes.language.chat_templates import template_render
from paceline.recipes.language.conversations import Message, parse_preference
from paceline.recipes.language.examples import Encoder, PairSet, parse_preferences
from paceline.recipes.language.losses import preference_losses
from paceline.recipes.language.records import read_file
from paceline.recipes.language.sft import main
from paceline.recipes.use import evaluate
from paceline.spec.errors import DataError

lacks_peft = importlib.util.find_spec("peft") is None
needs_peft = pytest.mark.skipif(lacks_peft, reason="peft is not installed")
USER = {"role": "user", "content": "Hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Hello", "Go"))
BETA = 0.3


# -- data ----------------------------------------------------------------------------------


@each_case(
    ("row",),
    [
        ({"prompt": "Hi", "chosen": "Hello", "rejected": "Go"},),
        ({"question": "Hi", "chosen": "Hello", "rejected": "Go"},),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},),
        ({"prompt": "Hi", "chosen": [GOOD], "rejected": [BAD]},),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]},),
        ({"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},),
    ],
)
def test_all_formats_parse_to_same_pair(row: dict[str, Any]) -> None:
    pair = parse_preference(row, "f line 1")
    user = Message("user", "Hi")
    assert pair.chosen.messages == (user, Message("assistant", "Hello", is_target=True))
    assert pair.rejected.messages == (user, Message("assistant", "Go", is_target=True))


def test_only_messages_after_common_prefix_are_targets() -> None:
    history = [USER, {"role": "assistant", "content": "Yes?"}, USER]
    row = {"system": "Be brief.", "prompt": history, "chosen": [GOOD], "rejected": [BAD]}
    pair = parse_preference(row, "f")
    assert [message.is_target for message in pair.chosen.messages] == [False] * 4 + [True]
    assert pair.chosen.messages[:4] == pair.rejected.messages[:4]
    unprompted = parse_preference({"chosen": [*history, GOOD], "rejected": [*history, BAD]}, "f")
    assert unprompted.chosen.messages == pair.chosen.messages[1:]
    both = {"system": "Be brief.", "prompt": history, "chosen": [*history, GOOD]}
    assert parse_preference({**both, "rejected": [*history, BAD]}, "f") == pair


def test_plain_texts_use_common_prefix_as_prompt() -> None:
    row = {"chosen": "Sky is blue.", "rejected": "Sky is black."}
    data_format, (pair,), _ = parse_preferences([("f", row)], skip_damaged=False)
    assert data_format == "text-preference"
    assert pair.chosen.text[: pair.chosen.num_context] == "Sky is"
    pairs = encode(pair)
    tokenizer = tiny_language_model.make_tokenizer()
    texts = [tokenizer.decode(example.tokens[example.targets]) for example in pairs.examples]
    assert texts == [" blue.<|end|>", " black.<|end|>"]


@each_case(
    ("row", "problem"),
    [
        ({"messages": [USER, GOOD]}, "no pair of answers"),
        ({"prompt": "Hi", "chosen": "Go", "rejected": "Go"}, "both answers are the same"),
        ({"prompt": "Hi", "chosen": " ", "rejected": "Go"}, "chosen answer, message 2: the answer"),
        ({"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER]}, "no message of the assis"),
        ({"chosen": "Yes", "rejected": "No"}, "no prompt, or nothing after it"),
        ({"chosen": "Yes", "rejected": "Yes, really"}, "no prompt, or nothing after it"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "roles out of order"),
        ({"prompt": "Hi", "chosen": 3, "rejected": "Go"}, "no list"),
        ({"prompt": "Ho", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "not begin with the p"),
        (
            {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "Ho"}, BAD]},
            "different prompts",
        ),
    ],
)
def test_rejects_invalid_preference_rows(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        parse_preference(row, "f line 1")


def test_reads_pairs_from_jsonl_json_and_csv(tmp_path: Path) -> None:
    row = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "a.json").write_text(json.dumps([row]))
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\nHi,Hello,Go\n")
    results = []
    for name in ("a.jsonl", "a.json", "a.csv"):
        data_format, pairs, errors = parse_preferences(
            [*read_file(tmp_path / name)], skip_damaged=False
        )
        assert (data_format, errors) == ("preference", [])
        results.append([pair.chosen.messages for pair in pairs])
    assert results[0] == results[1] == results[2]


def encode(*preferences: Any, limit: int = 200, too_long: Any = "refuse") -> PairSet:
    tokenizer = tiny_language_model.make_tokenizer()
    encoder = Encoder(tokenizer, template_render(tokenizer), True, "keep", limit, too_long)
    return encoder.encode_pairs(preferences)


def test_truncation_drops_pair_without_difference() -> None:
    row = {"prompt": "Hi", "chosen": "a" * 9 + "b", "rejected": "a" * 9 + "c" * 5}
    pair = parse_preference(row, "f")
    lengths = [len(example) for example in encode(pair).examples]
    truncated = encode(pair, limit=lengths[0], too_long="cut")
    assert (len(truncated), truncated.num_cut, truncated.num_dropped) == (1, 1, 0)
    with pytest.raises(DataError, match="within --max-length"):
        encode(pair, limit=lengths[0] - 3, too_long="cut")
    with pytest.raises(DataError, match=r"f, rejected answer has .* tokens"):
        encode(pair, limit=lengths[0])


# -- the loss ------------------------------------------------------------------------------


@given(st.lists(st.tuples(*[st.floats(0, 20)] * 4), min_size=1, max_size=5))
def test_loss_matches_dpo_definition(rows: list[tuple[float, float, float, float]]) -> None:
    table = torch.tensor(rows, dtype=torch.float64)
    losses, values = preference_losses(table[:, :2].flatten(), table[:, 2:], BETA)
    for n, (chosen, rejected, ref_chosen, ref_rejected) in enumerate(rows):
        margin = BETA * ((-chosen + ref_chosen) - (-rejected + ref_rejected))
        assert float(losses[n]) == pytest.approx(math.log1p(math.exp(-margin)), rel=1e-9)
        assert float(values["reward_margin"][n]) == pytest.approx(margin, abs=1e-9)


@pytest.fixture(scope="module")
def input_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a folder with a model and preferences."""
    folder = tmp_path_factory.mktemp("dpo")
    tiny_language_model.save(folder / "base")
    tiny_language_model.write_jsonl(folder / "pairs.jsonl", tiny_language_model.preferences(12))
    tiny_language_model.write_jsonl(folder / "val.jsonl", tiny_language_model.preferences(15)[12:])
    return folder


def train(input_dir: Path, run: Path, *flags: str) -> int:
    default_flags = (
        *(f"--model={input_dir}/base", f"--data={input_dir}/pairs.jsonl", f"--run-dir={run}"),
        *(f"--test-data={input_dir}/val.jsonl", "--objective=dpo", f"--dpo-beta={BETA}"),
        *("--device=cpu", "--dtype=float64", "--samples=0", "--log-every=1", "--max-length=200"),
        *("--global-batch=5", "--epochs=1", "--lr=0.02"),
    )
    return main(overridden([*default_flags], flags))


def answer_log_probs(model: Any, row: Mapping[str, str]) -> list[float]:
    """Returns the log-probabilities of both answers, computed in separate forward passes."""
    tokenizer = tiny_language_model.make_tokenizer()
    results = []
    for answer in (row["chosen"], row["rejected"]):
        prompt = f"<|start|>user\n{row['prompt']}<|end|>\n<|start|>assistant\n"
        start = len(tokenizer(prompt)["input_ids"])
        tokens = torch.tensor(tokenizer(f"{prompt}{answer}<|end|>")["input_ids"])
        with torch.no_grad():
            scores = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        chosen = scores[:-1].gather(1, tokens[1:, None])[:, 0]
        results.append(float(chosen[start - 1 :].sum()))
    return results


@needs_peft
@pytest.mark.parametrize("method", ["lora", "full"])
def test_metrics_match_reference_and_evaluation(
    method: str,
    input_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    assert train(input_dir, tmp_path / "run", f"--method={method}") == 0
    base = tiny_language_model.make_model().double()
    last = str(tmp_path / "run/adapters/last")
    if method == "full":
        tuned = AutoModelForCausalLM.from_pretrained(last).double()
    else:
        tuned = peft.PeftModel.from_pretrained(tiny_language_model.make_model(), last).double()
    margins = []
    for row in tiny_language_model.preferences(15)[12:]:
        (chosen, rejected), reference = answer_log_probs(tuned, row), answer_log_probs(base, row)
        margins.append(BETA * (chosen - reference[0] - rejected + reference[1]))
    loss = sum(math.log1p(math.exp(-margin)) for margin in margins) / 3
    (measured,) = records(tmp_path / "run", "test")
    assert abs(loss - math.log(2)) > 1e-3  # it has learned
    assert measured["loss"] == pytest.approx(loss, abs=1e-5)  # saved as float32
    assert measured["reward_margin"] == pytest.approx(sum(margins) / 3, abs=1e-5)
    assert measured["reward_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / 3)
    assert records(tmp_path / "run", "train")[0]["loss"] == pytest.approx(math.log(2), abs=1e-12)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    flags = [f"--run={tmp_path}/run", "--device=cpu", f"--figures={tmp_path}/figures.json"]
    assert evaluate.main(flags) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["loss"] == pytest.approx(measured["loss"], abs=1e-12)
    assert config(tmp_path / "run")["dpo_beta"] == BETA


@needs_peft
def test_caches_reference_per_data_base_and_dtype(
    input_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert train(input_dir, tmp_path / "a", "--steps=1") == 0
    assert capsys.readouterr().out.count("pairs: computed, and cached") == 2
    (file, *_) = files = [*tmp_path.glob("paceline/references/*/*")]
    assert len(files) == 2
    with monkeypatch.context() as patched:
        patched.setattr(references, "_pair_losses", None)
        assert train(input_dir, tmp_path / "b", "--steps=1", "--dpo-beta=1", "--lora-rank=2") == 0
    assert capsys.readouterr().out.count("pairs: from the cache") == 2
    assert train(input_dir, tmp_path / "c", "--steps=1", "--dtype=float32") == 0
    assert capsys.readouterr().out.count("pairs: computed, and cached") == 2
    file.write_bytes(b"short")
    assert train(input_dir, tmp_path / "d", "--steps=1") == 1
    assert "holds no reference log-probabilities" in capsys.readouterr().err


@needs_peft
def test_objective_must_match_data(
    input_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [f"--model={input_dir}/base", f"--data={input_dir}/pairs.jsonl"]
    assert main([*sources, f"--run-dir={tmp_path}/run", "--device=cpu"]) == 1
    assert "--objective dpo trains on preferences" in capsys.readouterr().err
    chats = tiny_language_model.write_jsonl(tmp_path / "a.jsonl", tiny_language_model.chats(4))
    assert train(input_dir, tmp_path / "run", f"--data={chats}") == 1
    assert "no pair of answers" in capsys.readouterr().err
    assert train(input_dir, tmp_path / "run", "--pack") == 2
    assert "both answers of a pair have a row of their own" in capsys.readouterr().err
    assert train(input_dir, tmp_path / "run", "--show-examples=1") == 0
    output = capsys.readouterr().out
    assert "line 1, chosen answer:" in output
    assert "line 1, rejected answer:" in output
    assert "12 pairs for training" in output
