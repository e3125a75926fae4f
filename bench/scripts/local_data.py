"""Creates small data sets and models under the names that the public scripts use.

Run ``python bench/scripts/local_data.py FOLDER`` in the environment of the scripts. It replaces
downloads: the scripts' names (``bert-base-cased``, ``nyu-mll/glue``) are relative paths of folders
in the working folder.
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
    rng = np.random.default_rng(1)
    write_images(folder, rng)
    write_sentence_pairs(folder / "nyu-mll" / "glue", rng)
    write_text(folder / "wikitext", rng)
    write_instructions(folder, rng)
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)
    models(folder)
    for name in ("Datasets", "data"):  # read by the scripts and by modules that they import
        write_mnist(folder / name / "MNIST" / "raw")


def sentence(rng: np.random.Generator, words: int = 12) -> str:
    return " ".join(rng.choice(WORDS, words)) + " ."


def write_images(folder: Path, rng: np.random.Generator) -> None:
    """Write an image folder with two parts and two classes of 16 images each."""
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            class_folder = folder / "images" / part / label
            class_folder.mkdir(parents=True)
            for number in range(16):
                pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(class_folder / f"{number}.jpg")


def write_sentence_pairs(folder: Path, rng: np.random.Generator) -> None:
    """Write a data set with the configuration ``mrpc``."""
    folder.mkdir(parents=True)
    for part, count in (("train", 64), ("validation", 24)):
        with (folder / f"{part}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["sentence1", "sentence2", "label", "idx"])
            for number in range(count):
                table.writerow([sentence(rng), sentence(rng), number % 2, number])
    describe(folder, "mrpc", ["train.csv", "validation.csv"])


def write_text(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir()
    for part in ("train", "validation", "test"):
        lines = "\n".join(sentence(rng, 60) for _ in range(400))
        (folder / f"{part}.txt").write_text(lines + "\n")
    describe(folder, "wikitext-2-v1", [f"{part}.txt" for part in ("train", "validation", "test")])


def describe(folder: Path, name: str, files: list[str]) -> None:
    """Write the README that makes a folder a data set with one configuration."""
    parts = [{"split": Path(file).stem, "path": file} for file in files]
    configs = json.dumps([{"config_name": name, "data_files": parts}])
    (folder / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")


def write_instructions(folder: Path, rng: np.random.Generator) -> None:
    """Write data for instruction tuning in both common formats."""
    pairs = [(sentence(rng), sentence(rng)) for _ in range(32)]
    rows = [
        {"instruction": instruction, "input": "", "output": output} for instruction, output in pairs
    ]
    (folder / "instructions.json").write_text(json.dumps(rows))
    chats = folder / "chats"
    chats.mkdir()
    lines = [json.dumps({"text": row["instruction"] + row["output"]}) for row in rows]
    (chats / "train.jsonl").write_text("\n".join(lines) + "\n")


def models(folder: Path) -> None:
    """Save tiny untrained models with a tokenizer for WORDS."""
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
    vocabulary = [*dict.fromkeys(special.values()), *WORDS, "."]
    word_level = models.WordLevel({word: number for number, word in enumerate(vocabulary)}, "[UNK]")
    raw = Tokenizer(word_level)
    raw.normalizer, raw.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=128, **special)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 64}  # fmt: skip
    bert = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes))
    special_ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    small = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, **special_ids)
    gpt = GPT2LMHeadModel(small)
    for name, model in (("bert-base-cased", bert), ("roberta-base", bert), ("gpt2", gpt)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def write_mnist(folder: Path) -> None:
    """Unpack Fashion-MNIST, whose files have MNIST's names and format."""
    folder.mkdir(parents=True)
    for packed in FASHION.glob("*.gz"):
        (folder / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
