"""Tests fine-tuning of a tiny language model: loss per token, adapters, checkpoints, errors."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_language_model
import torch
from recipe_tools import config, hub_variables, one_thread, records  # noqa: F401 - fixtures
from torch.nn.functional import cross_entropy

from command_lines import overridden
from paceline.recipes.language import memory, sft
from paceline.recipes.language.adapters import TrainedPart, add_adapters, checkpoint_gradients
from paceline.recipes.language.base_model import BaseModel, content_hash, settings_hash
from paceline.recipes.language.chat_templates import template_render
from paceline.recipes.language.conversations import parse_row
from paceline.recipes.language.examples import Encoder, ExampleSet
from paceline.recipes.language.losses import example_losses
from paceline.recipes.language.rows import make_rows, pack
from paceline.recipes.language.sft import add_end_tokens, keeps_apart, main
from paceline.recipes.language.sft import generate as continue_tokens
from paceline.recipes.use import evaluate, export, generate, predict
from paceline.spec import rundir
from paceline.spec.errors import DataError
from paceline.spec.terminal import clean

lacks_peft = importlib.util.find_spec("peft") is None  # importing it takes seconds in each worker
pytestmark = pytest.mark.skipif(lacks_peft, reason="peft is not installed")
BASE = ("--device=cpu", "--dtype=float64", "--samples=0", "--log-every=1", "--max-length=200")
UNCHANGED = "--lr=1e-300"  # too small to change any weight


@pytest.fixture(scope="module")
def input_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a folder with a model and conversations."""
    folder = tmp_path_factory.mktemp("sft")
    tiny_language_model.save(folder / "base")
    tiny_language_model.write_jsonl(folder / "chat.jsonl", tiny_language_model.chats(24))
    return folder


def train(input_dir: Path, run: Path, *flags: str) -> int:
    input_flags = [
        f"--model={input_dir}/base",
        f"--data={input_dir}/chat.jsonl",
        f"--run-dir={run}",
    ]
    return main(overridden([*input_flags, *BASE], flags))


def encoded(rows: list[dict[str, Any]]) -> ExampleSet:
    tokenizer = tiny_language_model.make_tokenizer()
    encoder = Encoder(tokenizer, template_render(tokenizer), True, "keep", 200, "refuse")
    return encoder.encode([parse_row(row, "messages", "f") for row in rows])


def token_losses(model: Any, examples: ExampleSet) -> list[torch.Tensor]:
    """Returns a tensor for each example with the loss of each trained token."""
    results = []
    for example in examples.examples:
        tokens, targets = torch.from_numpy(example.tokens), torch.from_numpy(example.targets)
        with torch.no_grad():
            scores = model(input_ids=tokens[None]).logits[0]
        results.append(cross_entropy(scores[:-1], tokens[1:], reduction="none")[targets[1:]])
    return results


def test_reported_losses_are_means_over_tokens(input_dir: Path, tmp_path: Path) -> None:
    test_data = tiny_language_model.write_jsonl(
        tmp_path / "test.jsonl", tiny_language_model.chats(11)[3:]
    )
    batch_flags = ("--global-batch=24", "--micro-batch=5", "--epochs=1", f"--test-data={test_data}")
    assert train(input_dir, tmp_path / "run", UNCHANGED, *batch_flags) == 0

    model = tiny_language_model.make_model().double()
    training = token_losses(model, encoded(tiny_language_model.chats(24)))
    held_out = token_losses(model, encoded(tiny_language_model.chats(11)[3:]))
    (trained,), (evaluated,) = (records(tmp_path / "run", part) for part in ("train", "test"))
    assert trained["loss"] == pytest.approx(float(torch.cat(training).mean()), abs=1e-12)
    assert evaluated["loss"] == pytest.approx(float(torch.cat(held_out).mean()), abs=1e-12)
    # wrong results: the mean over examples, or over parts of a batch
    by_example = float(torch.stack([losses.mean() for losses in training]).mean())
    parts = [torch.cat(training[start : start + 5]).mean() for start in range(0, 24, 5)]
    for other in (by_example, float(torch.stack(parts).mean())):
        assert abs(other - trained["loss"]) > 1e-6


@pytest.mark.parametrize(
    ("kind", "precision"), [("GPTNeoX", 1e-12), ("GPT2", 1e-12), ("Llama", 1e-6)]
)
def test_packed_losses_match_unpacked(kind: str, precision: float) -> None:
    examples = encoded(tiny_language_model.chats(9))
    model = tiny_language_model.make_model(kind=kind).double().eval()
    single = torch.stack([losses.sum() for losses in token_losses(model, examples)])
    # The last layout has more padding than GPT-2 has positions.
    layouts = [[[n] for n in range(9)], pack(examples.lengths(), 200), [[*range(9)]]]
    layouts.append([[*range(8)], [8]])
    for layout in layouts:
        rows = make_rows(examples.examples, layout, pad=1)
        logits = TrainedPart(model)(rows.tokens, rows.positions)
        losses = example_losses(logits, rows.labels, rows.examples, 9)
        torch.testing.assert_close(losses, single, rtol=precision, atol=0)


def test_packing_is_disabled_if_model_mixes_examples(
    input_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for kind in ("Llama", "GPTNeoX", "GPT2"):
        network = TrainedPart(tiny_language_model.make_model(kind=kind))
        assert keeps_apart(network, encoded(tiny_language_model.chats(2)))
    flags = (UNCHANGED, "--epochs=1")
    assert train(input_dir, tmp_path / "apart", *flags) == 0

    def mixing(network: TrainedPart, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        counting = torch.arange(tokens.shape[1])[None].expand_as(tokens)
        return network.whole_model(input_ids=tokens, position_ids=counting).logits  # type: ignore[no-any-return]

    monkeypatch.setattr(TrainedPart, "forward", mixing)
    assert train(input_dir, tmp_path / "mixing", *flags) == 0
    assert "this model mixes examples of a row" in capsys.readouterr().out
    separate_losses, mixing_losses = (
        [one["loss"] for one in records(tmp_path / name, "train")] for name in ("apart", "mixing")
    )
    assert mixing_losses == pytest.approx(separate_losses, abs=1e-6)
    assert not config(tmp_path / "mixing")["pack"]


def gradients(network: TrainedPart, examples: ExampleSet) -> torch.Tensor:
    rows = make_rows(examples.examples, pack(examples.lengths(), 200), pad=1)
    logits = network(rows.tokens, rows.positions)
    example_losses(logits, rows.labels, rows.examples, len(examples)).sum().backward()
    results = [parameter.grad for parameter in network.parameters()]
    assert all(grad is not None for grad in results)
    return torch.cat([grad.flatten() for grad in results if grad is not None])


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_gradient_checkpointing_keeps_gradients(method: Any) -> None:
    examples = encoded(tiny_language_model.chats(3))
    results = []
    for checkpoints in (False, True):
        model = add_adapters(
            tiny_language_model.make_model().double(), method, rank=2, alpha=4.0
        ).double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # they start at zero
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
            elif "lora_A" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
        if checkpoints:
            checkpoint_gradients(model, method)
        results.append(gradients(TrainedPart(model).train(), examples))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


def test_trained_part_exposes_only_trained_parameters() -> None:
    model = add_adapters(tiny_language_model.make_model(), "lora", rank=4, alpha=8.0)
    network = TrainedPart(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert dict(network.named_parameters()) == trained
    assert all("lora_" in name for name in network.state_dict())
    assert network.train().whole_model.training
    assert not network.eval().whole_model.training


def test_saves_peft_adapters_and_adapter_only_checkpoints(input_dir: Path, tmp_path: Path) -> None:
    import peft
    from safetensors import safe_open

    assert train(input_dir, tmp_path, "--epochs=2", "--lr=0.01", "--checkpoint-every=epoch") == 0
    for path in tmp_path.glob("checkpoints/*/*"):
        assert "frozen" not in path.name
        if path.name == "weights.safetensors":
            with safe_open(path, framework="pt") as content:
                assert all("lora_" in name for name in content.keys())  # noqa: SIM118
    last_loss = records(tmp_path, "val")[-1]["loss"]
    held_out = config(tmp_path)["data"]["sizes"]["val"]
    assert held_out == 2
    model = peft.PeftModel.from_pretrained(
        tiny_language_model.make_model().double(), str(tmp_path / "adapters/last")
    )
    losses = [
        float(torch.cat(token_losses(model.double().eval(), encoded(rows))).mean())
        for rows in _pairs(tiny_language_model.chats(24))
    ]
    assert any(loss == pytest.approx(last_loss, abs=1e-6) for loss in losses)  # saved as float32


def test_evaluation_reproduces_training_metrics(
    input_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    assert train(input_dir, tmp_path, "--epochs=1", "--lr=0.01", "--lora-rank=4") == 0
    (tmp_path / rundir.KEY).touch()  # which the launcher makes
    result = tmp_path / "figures.json"
    assert evaluate.main([f"--run={tmp_path}", f"--figures={result}", "--device=cpu"]) == 0
    figures = json.loads(result.read_text())
    assert figures["loss"] == records(tmp_path, "val")[-1]["loss"]
    assert (figures["split"], figures["samples"]) == ("val", 2)
    # nearly every token is a byte; tokens that end turns are not, but add to the loss
    assert 1 < figures["bits_per_byte"] / (figures["loss"] / math.log(2)) < 1.5
    one = tiny_language_model.write_jsonl(tmp_path / "one.jsonl", tiny_language_model.chats(1))
    other = [f"--run={tmp_path}", f"--data={one}", "--device=cpu"]
    assert evaluate.main(other) == 0
    assert predict.main(["text", f"--run={tmp_path}"]) == 2
    assert "paceline generate" in capsys.readouterr().err

    assert export.main([f"--run={tmp_path}", "--format=adapter"]) == 0
    assert export.main([f"--run={tmp_path}"]) == 0
    folder = tmp_path / "export"
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(str(folder / "transformers"))(tokens).logits
        adapted = peft.PeftModel.from_pretrained(
            tiny_language_model.make_model(), str(folder / "adapter")
        )
        expected = adapted.double()(tokens).logits
        torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)
    assert (folder / "transformers/chat_template.jinja").is_file()

    for part in (tmp_path, tmp_path / "model", tmp_path / "adapters/last"):
        with pytest.raises(DataError, match="is part of a run of Paceline") as caught:
            BaseModel(str(part)).check_no_run()
        command, then = caught.value.remedy.splitlines()
        assert command == f"paceline export {tmp_path}"
        BaseModel(then.removeprefix("Then: --model ")).load()


def test_interrupt_ends_generation_and_saves(
    input_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated = []

    def interrupted(*args: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        generated.append(continue_tokens(*args))
        return generated[-1]

    monkeypatch.setattr(sft, "generate", interrupted)
    flags = ("--samples=1", "--sample-tokens=100", "--steps=4", "--evaluate-every=2")
    with pytest.raises(SystemExit) as stopped:
        train(input_dir, tmp_path, *flags)
    assert stopped.value.code == 143
    assert [folder.name for folder in rundir.checkpoints(tmp_path)] == ["2"]
    assert len(generated[0].split()) <= 1
    assert not (tmp_path / sft.SAMPLES).exists()


def test_warns_if_settings_of_base_have_changed(
    input_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Path(shutil.copytree(input_dir / "base", tmp_path / "base"))
    assert train(input_dir, tmp_path / "run", f"--model={base}", "--steps=1") == 0
    flags = [f"--run={tmp_path}/run", "--device=cpu"]
    assert evaluate.main(flags) == 0
    assert "have changed since" not in capsys.readouterr().err
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.5}))
    assert evaluate.main(flags) == 0
    assert f"settings (config.json) of {base} have changed since" in capsys.readouterr().err


def test_chat_prompts_include_message_history(
    input_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train(input_dir, tmp_path, "--steps=2", "--lora-rank=2") == 0
    flags = [f"--run={tmp_path}", "--max-tokens=4", "--device=cpu", "--temperature=0"]
    prompts, answers = list[str](), list[str]()

    def answer(model: Any, tokenizer: Any, prompt: list[int], *_: Any, **options: Any) -> str:
        prompts.append(tokenizer.decode(prompt))
        answers.append(continue_tokens(model, tokenizer, prompt, *_, **options))
        return answers[-1]

    monkeypatch.setattr("paceline.recipes.use.generate.continue_tokens", answer)
    capsys.readouterr()
    assert generate.main([*flags, "--system=Be brief.", "One?", "Two?"]) == 0
    assert capsys.readouterr().out == "".join(f"{clean(answer)}\n" for answer in answers)
    assert prompts[0] == (
        "<|start|>system\nBe brief.<|end|>\n<|start|>user\nOne?<|end|>\n<|start|>assistant\n"
    )
    assert prompts[1].startswith(f"{prompts[0]}{answers[0]}")
    assert prompts[1].endswith("<|start|>user\nTwo?<|end|>\n<|start|>assistant\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("\nOne?\n"))
    assert generate.main([*flags, "--system=Be brief."]) == 0
    assert answers[-1] == answers[0]
    assert generate.main([*flags, "--no-chat", "One?"]) == 0
    assert prompts[-1] == "One?"
    for prompt, problem in (("", "the prompt is empty"), ("a\udcff", "a prompt is not in UTF-8")):
        assert generate.main([*flags, "--no-chat", prompt]) == 1
        assert problem in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    assert generate.main(flags) == 1
    assert "a prompt is not in UTF-8" in capsys.readouterr().err
    saved_config = json.loads((tmp_path / "model/config.json").read_text())
    saved_config["system"] = "drop"
    monkeypatch.setattr("paceline.train.load_config", lambda folder: saved_config)
    assert generate.main([*flags, "--system=Be brief.", "One?"]) == 1
    assert "it leaves out the message of --system" in capsys.readouterr().err


def test_full_models_are_saved_for_transformers(input_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    data = tiny_language_model.write_jsonl(tmp_path / "val.jsonl", tiny_language_model.chats(3))
    flags = ("--method=full", "--epochs=1", "--lr=0.01", f"--test-data={data}")
    assert train(input_dir, tmp_path / "run", *flags) == 0
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "run/adapters/last"))
    losses = token_losses(model.double(), encoded(tiny_language_model.chats(3)))
    last_loss = records(tmp_path / "run", "test")[-1]["loss"]
    assert float(torch.cat(losses).mean()) == pytest.approx(last_loss, abs=1e-6)
    assert not (tmp_path / "run/adapters/best").exists()


def _pairs(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[rows[a], rows[b]] for a in range(len(rows)) for b in range(a + 1, len(rows))]


def test_base_hashes_cover_weights_and_settings() -> None:
    assert content_hash(tiny_language_model.make_model()) == content_hash(
        tiny_language_model.make_model()
    )
    changed = tiny_language_model.make_model()
    changed.model.norm.weight.data[3] += 1e-3
    assert content_hash(changed) != content_hash(tiny_language_model.make_model())
    assert settings_hash(changed) == settings_hash(tiny_language_model.make_model())
    changed.config.rms_norm_eps *= 2
    assert settings_hash(changed) != settings_hash(tiny_language_model.make_model())


def test_resume_rejects_different_base_model(
    input_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(input_dir, tmp_path / "run", "--epochs=1", UNCHANGED) == 0
    other = tmp_path / "base"
    tiny_language_model.save(other)
    model = tiny_language_model.make_model()
    model.model.norm.weight.data[3] += 1e-3
    model.save_pretrained(str(other))
    assert train(input_dir, tmp_path / "run", "--epochs=2", f"--model={other}") != 0
    assert "base" in capsys.readouterr().err


def test_show_examples_exits_before_training(
    input_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(input_dir, tmp_path, "--show-examples=2") == 0
    output = capsys.readouterr().out
    assert "messages format" in output
    assert output.count("trained on (>)") == 2
    assert "22 examples for training: 1,831 tokens, 474 of them trained on (26%)" in output
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("rows", "flags", "problem"),
    [
        (["{"], [], "bad.jsonl line 2 is not valid JSON"),
        ([{"prompt": "a", "completion": " "}], [], "line 2, message 2: the answer is empty"),
        ([{"prompt": "a" * 300, "completion": "b"}], [], "longer than --max-length 200"),
        ([], ["--chat-template=missing"], "--chat-template missing cannot be read"),
        ([], ["--model=nowhere/at/all"], "--model nowhere/at/all is not there"),
    ],
)  # fmt: skip
def test_rejects_invalid_data_and_sources(
    rows: list[Any],
    flags: list[str],
    problem: str,
    input_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    valid_lines = [json.dumps({"prompt": f"{n}", "completion": f"{n}"}) for n in range(3)]
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([valid_lines[0], *lines, *valid_lines[1:]]))
    assert train(input_dir, tmp_path / "run", f"--data={path}", "--epochs=1", *flags) in (1, 2)
    assert problem in capsys.readouterr().err


def test_skip_damaged_omits_and_counts_rows(
    input_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    valid_lines = [json.dumps({"prompt": f"{n}", "completion": f"{n}"}) for n in range(4)]
    path.write_text("\n".join([*valid_lines, "{", json.dumps({"prompt": "a", "completion": ""})]))
    assert (
        train(input_dir, tmp_path / "run", f"--data={path}", "--skip-damaged", "--show-examples=1")
        == 0
    )
    assert "2 damaged, left out" in capsys.readouterr().out


def test_conversations_need_chat_template(
    input_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_language_model.save(tmp_path / "bare", template=None)
    rows = [{"prompt": f"{n}", "completion": f"{n}"} for n in range(4)]
    data = tiny_language_model.write_jsonl(tmp_path / "pairs.jsonl", rows)
    common_flags = (f"--model={tmp_path}/bare", f"--data={data}", "--show-examples=1")
    assert train(input_dir, tmp_path / "run", *common_flags) == 1
    assert "FILE with a template, or none, which joins" in capsys.readouterr().err
    assert train(input_dir, tmp_path / "run", *common_flags, "--chat-template=none") == 0
    conversations = (common_flags[0], "--show-examples=1")  # some have several answers
    assert train(input_dir, tmp_path / "run", *conversations) == 1
    assert "none, which joins" not in capsys.readouterr().err
    (tmp_path / "template.jinja").write_text(tiny_language_model.CHATML)
    assert (
        train(
            input_dir, tmp_path / "run", *common_flags, f"--chat-template={tmp_path}/template.jinja"
        )
        == 0
    )


def test_rejects_tokens_outside_model_vocabulary(
    tmp_path: Path, input_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_language_model.save(tmp_path / "small", num_tokens=60)
    assert train(input_dir, tmp_path / "run", f"--model={tmp_path}/small") == 1
    assert "is none of the model's" in capsys.readouterr().err


def test_early_stopping_on_held_out_loss(
    input_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(input_dir, tmp_path / "a", "--epochs=5", UNCHANGED, "--patience=1") == 0
    assert "no lower held-out loss in 1 evaluations" in capsys.readouterr().out
    assert train(input_dir, tmp_path / "b", "--epochs=5", UNCHANGED, "--stop-at=9") == 0
    assert "is at most --stop-at 9" in capsys.readouterr().out
    assert len(records(tmp_path / "b", "val")) == 1


def test_evaluation_generates_samples(input_dir: Path, tmp_path: Path) -> None:
    flags = ("--samples=2", "--sample-tokens=5", "--epochs=1")
    assert train(input_dir, tmp_path, UNCHANGED, *flags) == 0
    results = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [list(one) for one in results] == [["prompt", "expected", "generated"]] * 2
    assert all(one["prompt"].endswith("<|start|>assistant\n") for one in results)


def test_generation_stops_at_context_length() -> None:
    model = tiny_language_model.make_model(kind="GPT2").eval()
    tokenizer = tiny_language_model.make_tokenizer()
    assert len(tokenizer(continue_tokens(model, tokenizer, [5] * 250, 64))["input_ids"]) <= 6


def test_generation_config_is_used_only_for_end_tokens() -> None:
    model, tokenizer = tiny_language_model.make_model().eval(), tiny_language_model.make_tokenizer()
    prompt = tokenizer("Sure? ")["input_ids"]
    greedy_text = continue_tokens(model, tokenizer, prompt, 5)
    first = tokenizer(greedy_text)["input_ids"][0]
    settings = model.generation_config
    settings.repetition_penalty, settings.suppress_tokens, settings.max_length = 5.0, [first], 7
    for choice in ({}, {"do_sample": True, "top_k": 1}):
        assert continue_tokens(model, tokenizer, prompt, 5, **choice) == greedy_text
    add_end_tokens(model, [first])
    assert settings.eos_token_id == sorted([first, 1])
    assert continue_tokens(model, tokenizer, prompt, 5) == tokenizer.decode([first])
    adapted = add_adapters(model, "lora", 2, 4.0)
    assert continue_tokens(adapted, tokenizer, prompt, 5) == tokenizer.decode([first])
    assert model.generation_config is settings


def test_rejects_training_beyond_device_memory(
    input_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs = 1e6  # bytes: 30 % for scores, 10 % for weights
    monkeypatch.setattr(memory, "device_memory", lambda *_: (memory.PROCESS_BYTES + needs, needs))
    flags = ("--global-batch=16", "--steps=1")

    assert train(input_dir, tmp_path / "run", *flags) == 2

    error = capsys.readouterr().err
    assert "the training does not fit into the memory of" in error
    assert re.search(r"--micro-batch \d", error)


def test_resume_rejects_different_chat_template(
    input_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_language_model.make_tokenizer()
    template = tmp_path / "other.jinja"
    template.write_text(f"{tokenizer.chat_template}".replace("user", "reader") + "{# other #}")
    assert train(input_dir, tmp_path / "run", "--epochs=1") == 0
    capsys.readouterr()
    assert train(input_dir, tmp_path / "run", "--epochs=2", f"--chat-template={template}") == 2
    error = capsys.readouterr().err
    assert "is of another training" in error
    assert "chat_template: " in error
    assert "data: " not in error
