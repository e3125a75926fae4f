"""Fine-tuning of a tiny language model: losses by token, adapters, checkpoints, refusals."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_language_model
import torch
from recipe_tools import config, hub_variables, one_thread, records  # noqa: F401 - fixtures
from torch.nn.functional import cross_entropy

from overriding import overridden
from paceline.recipes.language import memory
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
from paceline.spec.terminal import clean

lacks_peft = importlib.util.find_spec("peft") is None  # to import it takes every worker seconds
pytestmark = pytest.mark.skipif(lacks_peft, reason="peft is not installed")
BASE = ("--device=cpu", "--dtype=float64", "--samples=0", "--log-every=1", "--max-length=200")
UNCHANGED = "--lr=1e-300"  # too little for any weight to change


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and conversations."""
    folder = tmp_path_factory.mktemp("sft")
    tiny_language_model.save(folder / "base")
    tiny_language_model.write_jsonl(folder / "chat.jsonl", tiny_language_model.chats(24))
    return folder


def train(place: Path, run: Path, *flags: str) -> int:
    named = [f"--model={place}/base", f"--data={place}/chat.jsonl", f"--run-dir={run}"]
    return main(overridden([*named, *BASE], flags))


def encoded(rows: list[dict[str, Any]]) -> ExampleSet:
    tokenizer = tiny_language_model.make_tokenizer()
    encoder = Encoder(tokenizer, template_render(tokenizer), True, "keep", 200, "refuse")
    return encoder.encode([parse_row(row, "messages", "f") for row in rows])


def token_losses(model: Any, examples: ExampleSet) -> list[torch.Tensor]:
    """The loss of every trained token, one example after the other."""
    found = []
    for example in examples.examples:
        tokens, targets = torch.from_numpy(example.tokens), torch.from_numpy(example.targets)
        with torch.no_grad():
            scores = model(input_ids=tokens[None]).logits[0]
        found.append(cross_entropy(scores[:-1], tokens[1:], reduction="none")[targets[1:]])
    return found


def test_losses_of_training_and_evaluation_equal_a_recount(place: Path, tmp_path: Path) -> None:
    test_data = tiny_language_model.write_jsonl(
        tmp_path / "test.jsonl", tiny_language_model.chats(11)[3:]
    )
    whole = ("--global-batch=24", "--micro-batch=5", "--epochs=1", f"--test-data={test_data}")
    assert train(place, tmp_path / "run", UNCHANGED, *whole) == 0

    model = tiny_language_model.make_model().double()
    training = token_losses(model, encoded(tiny_language_model.chats(24)))
    held_out = token_losses(model, encoded(tiny_language_model.chats(11)[3:]))
    (trained,), (evaluated,) = (records(tmp_path / "run", part) for part in ("train", "test"))
    assert trained["loss"] == pytest.approx(float(torch.cat(training).mean()), abs=1e-12)
    assert evaluated["loss"] == pytest.approx(float(torch.cat(held_out).mean()), abs=1e-12)
    # what the mean over examples, or over parts of a batch, would have been instead
    by_example = float(torch.stack([losses.mean() for losses in training]).mean())
    parts = [torch.cat(training[start : start + 5]).mean() for start in range(0, 24, 5)]
    for other in (by_example, float(torch.stack(parts).mean())):
        assert abs(other - trained["loss"]) > 1e-6


@pytest.mark.parametrize(
    ("kind", "precision"), [("GPTNeoX", 1e-12), ("GPT2", 1e-12), ("Llama", 1e-6)]
)
def test_packed_examples_have_the_losses_of_single_ones(kind: str, precision: float) -> None:
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


def test_models_that_mix_the_examples_of_a_row_are_found(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("Llama", "GPTNeoX", "GPT2"):
        network = TrainedPart(tiny_language_model.make_model(kind=kind))
        assert keeps_apart(network, encoded(tiny_language_model.chats(2)))
    flags = (UNCHANGED, "--epochs=1")
    assert train(place, tmp_path / "apart", *flags) == 0

    def mixing(network: TrainedPart, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        counting = torch.arange(tokens.shape[1])[None].expand_as(tokens)
        return network.whole_model(input_ids=tokens, position_ids=counting).logits  # type: ignore[no-any-return]

    monkeypatch.setattr(TrainedPart, "forward", mixing)
    assert train(place, tmp_path / "mixing", *flags) == 0
    assert "this model mixes examples of a row" in capsys.readouterr().out
    apart, mixing_losses = (
        [one["loss"] for one in records(tmp_path / name, "train")] for name in ("apart", "mixing")
    )
    assert mixing_losses == pytest.approx(apart, abs=1e-6)
    assert not config(tmp_path / "mixing")["pack"]


def gradients(network: TrainedPart, examples: ExampleSet) -> torch.Tensor:
    rows = make_rows(examples.examples, pack(examples.lengths(), 200), pad=1)
    logits = network(rows.tokens, rows.positions)
    example_losses(logits, rows.labels, rows.examples, len(examples)).sum().backward()
    found = [parameter.grad for parameter in network.parameters()]
    assert all(grad is not None for grad in found)
    return torch.cat([grad.flatten() for grad in found if grad is not None])


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_gradient_checkpointing_changes_no_gradient(method: Any) -> None:
    examples = encoded(tiny_language_model.chats(3))
    found = []
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
        found.append(gradients(TrainedPart(model).train(), examples))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_only_what_is_trained_is_seen_by_a_session() -> None:
    model = add_adapters(tiny_language_model.make_model(), "lora", rank=4, alpha=8.0)
    network = TrainedPart(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert dict(network.named_parameters()) == trained
    assert all("lora_" in name for name in network.state_dict())
    assert network.train().whole_model.training
    assert not network.eval().whole_model.training


def test_adapters_are_saved_for_peft_and_checkpoints_hold_nothing_else(
    place: Path, tmp_path: Path
) -> None:
    import peft
    from safetensors import safe_open

    assert train(place, tmp_path, "--epochs=2", "--lr=0.01", "--checkpoint-every=epoch") == 0
    for path in tmp_path.glob("checkpoints/*/*"):
        assert "frozen" not in path.name
        if path.name == "weights.safetensors":
            with safe_open(path, framework="pt") as content:
                assert all("lora_" in name for name in content.keys())  # noqa: SIM118
    last = records(tmp_path, "val")[-1]["loss"]
    held_out = config(tmp_path)["data"]["sizes"]["val"]
    assert held_out == 2
    model = peft.PeftModel.from_pretrained(
        tiny_language_model.make_model().double(), str(tmp_path / "adapters/last")
    )
    losses = [
        float(torch.cat(token_losses(model.double().eval(), encoded(rows))).mean())
        for rows in _pairs(tiny_language_model.chats(24))
    ]
    assert any(loss == pytest.approx(last, abs=1e-6) for loss in losses)  # saved as float32


def test_an_evaluation_of_the_run_gives_the_figures_of_the_training(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    assert train(place, tmp_path, "--epochs=1", "--lr=0.01", "--lora-rank=4") == 0
    result = tmp_path / "figures.json"
    assert evaluate.main([f"--run={tmp_path}", f"--figures={result}", "--device=cpu"]) == 0
    figures = json.loads(result.read_text())
    assert figures["loss"] == records(tmp_path, "val")[-1]["loss"]
    assert (figures["split"], figures["samples"]) == ("val", 2)
    # nearly every token is a byte; the ends of turns, which are none, add to the loss
    assert 1 < figures["bits_per_byte"] / (figures["loss"] / math.log(2)) < 1.5
    one = tiny_language_model.write_jsonl(tmp_path / "one.jsonl", tiny_language_model.chats(1))
    other = [f"--run={tmp_path}", f"--data={one}", "--device=cpu"]
    assert evaluate.main(other) == 1
    assert "--split train" in capsys.readouterr().err
    assert evaluate.main([*other, "--split=train"]) == 0
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


def test_a_conversation_goes_on_with_all_earlier_messages(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train(place, tmp_path, "--steps=2", "--lora-rank=2") == 0
    flags = [f"--run={tmp_path}", "--max-tokens=4", "--device=cpu", "--temperature=0"]
    prompts, answers = list[str](), list[str]()

    def answer(model: Any, tokenizer: Any, prompt: list[int], *_: Any, **more: Any) -> str:
        prompts.append(tokenizer.decode(prompt))
        answers.append(continue_tokens(model, tokenizer, prompt, *_, **more))
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
    described = json.loads((tmp_path / "model/config.json").read_text())
    described["system"] = "drop"
    monkeypatch.setattr("paceline.train.load_config", lambda folder: described)
    assert generate.main([*flags, "--system=Be brief.", "One?"]) == 1
    assert "it leaves out the message of --system" in capsys.readouterr().err


def test_whole_models_are_saved_for_transformers(place: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    data = tiny_language_model.write_jsonl(tmp_path / "val.jsonl", tiny_language_model.chats(3))
    flags = ("--method=full", "--epochs=1", "--lr=0.01", f"--test-data={data}")
    assert train(place, tmp_path / "run", *flags) == 0
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "run/adapters/last"))
    losses = token_losses(model.double(), encoded(tiny_language_model.chats(3)))
    last = records(tmp_path / "run", "test")[-1]["loss"]
    assert float(torch.cat(losses).mean()) == pytest.approx(last, abs=1e-6)
    assert not (tmp_path / "run/adapters/best").exists()


def _pairs(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[rows[a], rows[b]] for a in range(len(rows)) for b in range(a + 1, len(rows))]


def test_base_models_are_known_by_their_content_and_settings() -> None:
    assert content_hash(tiny_language_model.make_model()) == content_hash(
        tiny_language_model.make_model()
    )
    changed = tiny_language_model.make_model()
    changed.model.norm.weight.data[3] += 1e-3
    assert content_hash(changed) != content_hash(tiny_language_model.make_model())
    assert settings_hash(changed) == settings_hash(tiny_language_model.make_model())
    changed.config.rms_norm_eps *= 2
    assert settings_hash(changed) != settings_hash(tiny_language_model.make_model())


def test_a_run_goes_on_only_with_its_own_base(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(place, tmp_path / "run", "--epochs=1", UNCHANGED) == 0
    other = tmp_path / "base"
    tiny_language_model.save(other)
    model = tiny_language_model.make_model()
    model.model.norm.weight.data[3] += 1e-3
    model.save_pretrained(str(other))
    assert train(place, tmp_path / "run", "--epochs=2", f"--model={other}") != 0
    assert "base" in capsys.readouterr().err


def test_shown_examples_end_the_command(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(place, tmp_path, "--show-examples=2") == 0
    shown = capsys.readouterr().out
    assert "messages format" in shown
    assert shown.count("trained on (>)") == 2
    assert "22 examples for training: 1,831 tokens, 501 of them trained on (27%)" in shown
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
def test_bad_data_are_refused_before_the_start(
    rows: list[Any],
    flags: list[str],
    problem: str,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    good = [json.dumps({"prompt": f"{n}", "completion": f"{n}"}) for n in range(3)]
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([good[0], *lines, *good[1:]]))
    assert train(place, tmp_path / "run", f"--data={path}", "--epochs=1", *flags) in (1, 2)
    assert problem in capsys.readouterr().err


def test_damaged_rows_are_left_out_and_counted_on_request(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    good = [json.dumps({"prompt": f"{n}", "completion": f"{n}"}) for n in range(4)]
    path.write_text("\n".join([*good, "{", json.dumps({"prompt": "a", "completion": ""})]))
    assert (
        train(place, tmp_path / "run", f"--data={path}", "--skip-damaged", "--show-examples=1") == 0
    )
    assert "2 damaged, left out" in capsys.readouterr().out


def test_a_model_without_chat_template_needs_one_for_conversations(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_language_model.save(tmp_path / "bare", template=None)
    rows = [{"prompt": f"{n}", "completion": f"{n}"} for n in range(4)]
    data = tiny_language_model.write_jsonl(tmp_path / "pairs.jsonl", rows)
    bare = (f"--model={tmp_path}/bare", f"--data={data}", "--show-examples=1")
    assert train(place, tmp_path / "run", *bare) == 1
    assert "has no chat template" in capsys.readouterr().err
    assert train(place, tmp_path / "run", *bare, "--chat-template=none") == 0
    (tmp_path / "template.jinja").write_text(tiny_language_model.CHATML)
    assert train(place, tmp_path / "run", *bare, f"--chat-template={tmp_path}/template.jinja") == 0


def test_tokens_that_the_model_lacks_are_refused(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_language_model.save(tmp_path / "small", num_tokens=60)
    assert train(place, tmp_path / "run", f"--model={tmp_path}/small") == 1
    assert "is none of the model's" in capsys.readouterr().err


def test_early_stopping_by_the_held_out_loss(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(place, tmp_path / "a", "--epochs=5", UNCHANGED, "--patience=1") == 0
    assert "no lower held-out loss in 1 evaluations" in capsys.readouterr().out
    assert train(place, tmp_path / "b", "--epochs=5", UNCHANGED, "--stop-at=9") == 0
    assert "is at most --stop-at 9" in capsys.readouterr().out
    assert len(records(tmp_path / "b", "val")) == 1


def test_answers_are_generated_at_each_evaluation(place: Path, tmp_path: Path) -> None:
    flags = ("--samples=2", "--sample-tokens=5", "--epochs=1")
    assert train(place, tmp_path, UNCHANGED, *flags) == 0
    found = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [list(one) for one in found] == [["prompt", "expected", "generated"]] * 2
    assert all(one["prompt"].endswith("<|start|>assistant\n") for one in found)


def test_no_more_tokens_are_generated_than_the_model_can_read() -> None:
    model = tiny_language_model.make_model(kind="GPT2").eval()
    tokenizer = tiny_language_model.make_tokenizer()
    assert len(tokenizer(continue_tokens(model, tokenizer, [5] * 250, 64))["input_ids"]) <= 6


def test_of_the_settings_for_generation_only_ends_are_used() -> None:
    model, tokenizer = tiny_language_model.make_model().eval(), tiny_language_model.make_tokenizer()
    prompt = tokenizer("Sure? ")["input_ids"]
    plain = continue_tokens(model, tokenizer, prompt, 5)
    first = tokenizer(plain)["input_ids"][0]
    own = model.generation_config
    own.repetition_penalty, own.suppress_tokens, own.max_length = 5.0, [first], 7
    for choice in ({}, {"do_sample": True, "top_k": 1}):
        assert continue_tokens(model, tokenizer, prompt, 5, **choice) == plain
    add_end_tokens(model, [first])
    assert own.eos_token_id == sorted([first, 1])
    assert continue_tokens(model, tokenizer, prompt, 5) == tokenizer.decode([first])
    adapted = add_adapters(model, "lora", 2, 4.0)
    assert continue_tokens(adapted, tokenizer, prompt, 5) == tokenizer.decode([first])
    assert model.generation_config is own


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
def test_a_model_from_a_gguf_file_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5 marks such a model as quantized, and refuses to save what it made floats."""
    import transformers
    from transformers.quantizers.base import HfQuantizer

    class Quantizer(HfQuantizer):  # type: ignore[misc]
        is_trainable = True

        def __init__(self) -> None:
            self.quantization_config = type("Config", (), {"quant_method": "gguf"})

        def is_serializable(self) -> bool:
            return False

    def load(**_: object) -> object:
        model = tiny_language_model.make_model()
        model.config.quantization_config = {"quant_method": "gguf"}
        model.hf_quantizer = Quantizer()
        return model

    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    (tmp_path / "x.gguf").touch()

    BaseModel(str(tmp_path / "x.gguf")).load().save_pretrained(str(tmp_path / "out"))

    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config


def test_memory_is_stated_and_what_cannot_fit_is_refused(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs = 1e6  # bytes, of which 0.3 are for scores and 0.1 for weights
    monkeypatch.setattr(memory, "device_memory", lambda *_: (memory.PROCESS_BYTES + needs, needs))
    flags = ("--global-batch=16", "--steps=1")

    assert train(place, tmp_path / "run", *flags) == 2

    error = capsys.readouterr().err
    assert "the training does not fit into the memory of" in error
    assert re.search(r"--micro-batch \d", error)


def test_another_chat_template_is_named_when_a_run_resumes(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_language_model.make_tokenizer()
    template = tmp_path / "other.jinja"
    template.write_text(f"{tokenizer.chat_template}".replace("user", "reader") + "{# other #}")
    assert train(place, tmp_path / "run", "--epochs=1") == 0
    capsys.readouterr()
    assert train(place, tmp_path / "run", "--epochs=2", f"--chat-template={template}") == 2
    error = capsys.readouterr().err
    assert "is of another training" in error
    assert "chat_template: " in error
    assert "data: " not in error
