"""Small data and models under the names that the public scripts ask for, since there is no network.

``python bench/scripts/local_data.py FOLDER``, with the environment in which the scripts run. They
are given relative names (``bert-base-cased``, ``nyu-mll/glue``), which a folder of that name below
the working folder answers to.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

FASHION = Path("/usr/share/datasets/fashion-mnist")
WORDS = ["the", "cat", "dog", "saw", "ran", "home", "old", "new", "red", "blue", "and", "in"]
METRIC = '''
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        names = ("predictions", "references")
        features = datasets.Features({name: datasets.Value("int64") for name in names})
        return evaluate.MetricInfo("", "", features=features, inputs_description="")

    def _compute(self, predictions, references):
        hits = sum(one == other for one, other in zip(predictions, references))
        return {"accuracy": hits / max(1, len(references))}
'''  # fmt: skip


def main(folder: Path) -> None:
    draw = np.random.default_rng(1)
    pictures(folder, draw)
    sentence_pairs(folder / "nyu-mll" / "glue", draw)
    plain_text(folder / "wikitext", draw)
    instructions(folder, draw)
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)
    models(folder)
    for name in ("Datasets", "data"):  # the scripts themselves, and what they import
        mnist(folder / name / "MNIST" / "raw")


def sentence(draw: np.random.Generator, words: int = 12) -> str:
    return " ".join(draw.choice(WORDS, words)) + " ."


def pictures(folder: Path, draw: np.random.Generator) -> None:
    """An image folder: two parts, two classes, sixteen images each."""
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            where = folder / "images" / part / label
            where.mkdir(parents=True)
            for number in range(16):
                pixels = draw.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(where / f"{number}.jpg")


def sentence_pairs(folder: Path, draw: np.random.Generator) -> None:
    """A data set with the configuration ``mrpc``."""
    folder.mkdir(parents=True)
    for part, count in (("train", 64), ("validation", 24)):
        with (folder / f"{part}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["sentence1", "sentence2", "label", "idx"])
            for number in range(count):
                table.writerow([sentence(draw), sentence(draw), number % 2, number])
    describe(folder, "mrpc", ["train.csv", "validation.csv"])


def plain_text(folder: Path, draw: np.random.Generator) -> None:
    folder.mkdir()
    for part in ("train", "validation", "test"):
        lines = "\n".join(sentence(draw, 60) for _ in range(400))
        (folder / f"{part}.txt").write_text(lines + "\n")
    describe(folder, "wikitext-2-v1", [f"{part}.txt" for part in ("train", "validation", "test")])


def describe(folder: Path, name: str, files: list[str]) -> None:
    """Makes a folder a data set with one configuration."""
    parts = [{"split": Path(file).stem, "path": file} for file in files]
    configs = json.dumps([{"config_name": name, "data_files": parts}])
    (folder / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")


def instructions(folder: Path, draw: np.random.Generator) -> None:
    """For instruction tuning, in the two forms in use."""
    pairs = [(sentence(draw), sentence(draw)) for _ in range(32)]
    rows = [{"instruction": one, "input": "", "output": other} for one, other in pairs]
    (folder / "instructions.json").write_text(json.dumps(rows))
    chats = folder / "chats"
    chats.mkdir()
    lines = [json.dumps({"text": row["instruction"] + row["output"]}) for row in rows]
    (chats / "train.jsonl").write_text("\n".join(lines) + "\n")


def models(folder: Path) -> None:
    """Untrained and tiny, with a tokenizer for the words above."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
    )

    special = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]",
               "cls_token": "[CLS]", "mask_token": "[MASK]", "eos_token": "[SEP]",
               "bos_token": "[CLS]"}  # fmt: skip
    known = [*dict.fromkeys(special.values()), *WORDS, "."]
    level = models.WordLevel({word: number for number, word in enumerate(known)}, "[UNK]")
    raw = Tokenizer(level)
    raw.normalizer, raw.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=128, **special)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 64}  # fmt: skip
    bert = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes))
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    small = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, **ends)
    gpt = GPT2LMHeadModel(small)
    for name, model in (("bert-base-cased", bert), ("roberta-base", bert), ("gpt2", gpt)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def mnist(folder: Path) -> None:
    """Fashion-MNIST's files have MNIST's names and form."""
    folder.mkdir(parents=True)
    for packed in FASHION.glob("*.gz"):
        (folder / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
