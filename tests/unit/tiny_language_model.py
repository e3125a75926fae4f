"""Creates a tiny language model with random weights and a byte tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm

tqdm.tqdm.monitor_interval = 0  # disables a thread that would outlive the test

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str | None = CHATML) -> Any:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        extra_special_tokens=["<|start|>"],
    )
    fast.chat_template = template
    return fast


def make_model(num_tokens: int = 258, kind: str = "Llama", width: int = 16) -> Any:
    """Makes a ``Llama`` (float32 norms), ``GPTNeoX`` (one dtype), or ``GPT2``, which has
    learned positions.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=num_tokens,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def save(
    folder: Path, template: str | None = CHATML, num_tokens: int = 258, kind: str = "Llama"
) -> Path:
    """Writes the tokenizer and the model."""
    make_tokenizer(template).save_pretrained(str(folder))
    make_model(num_tokens, kind).save_pretrained(str(folder))
    return folder


def chats(count: int) -> list[dict[str, Any]]:
    """Returns conversations of different lengths, some with a system message or two turns."""
    rows = []
    for n in range(count):
        turns = [{"role": "system", "content": "Be brief."}] if n % 3 else []
        turns += [
            {"role": "user", "content": f"How much is {n} plus {n}?"},
            {"role": "assistant", "content": f"{2 * n}" + " indeed" * (n % 5)},
        ]
        if n % 4 == 0:
            turns += [
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes." * (1 + n % 7)},
            ]
        rows.append({"messages": turns})
    return rows


def preferences(count: int) -> list[dict[str, Any]]:
    """Returns pairs of answers of different lengths."""
    return [
        {
            "prompt": f"How much is {n} plus {n}?",
            "chosen": f"{2 * n}" + " indeed" * (n % 5),
            "rejected": f"{2 * n + 1}" + "!" * (n % 3),
        }
        for n in range(count)
    ]


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
