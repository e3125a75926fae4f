"""Small models and data sets of Hugging Face, made in local folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.recipes.data.texts import meals


def bert(folder: Path) -> Path:
    """A tiny BERT with the words of the generated reviews, and its tokenizer."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    fast = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    fast.train_from_iterator([text for _, text in meals(0)], trainer)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **names)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), intermediate_size=64, max_position_embeddings=64, **shape
    )
    _quiet(transformers)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def vit(folder: Path) -> Path:
    """A tiny vision transformer for 16×16 images."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ViTConfig(intermediate_size=64, image_size=16, patch_size=4, **shape)
    _quiet(transformers)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    halves, size = [0.5, 0.5, 0.5], {"height": 16, "width": 16}
    content = {"image_mean": halves, "image_std": halves, "size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    return folder


def convnext(folder: Path) -> Path:
    """A tiny convolutional network for images of any size."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1])
    _quiet(transformers)
    transformers.ConvNextForImageClassification(config).save_pretrained(folder)
    return folder


def _quiet(library: Any) -> None:
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()


def images(folder: Path, count: int = 40) -> Path:
    """A saved data set of light and dark images."""
    import datasets

    draw = np.random.default_rng(0)
    labels = [number % 2 for number in range(count)]
    pixels = [draw.integers(0, 100, (12, 10, 3), dtype=np.uint8) + 100 * one for one in labels]
    names = datasets.ClassLabel(names=["dark", "light"])
    features = datasets.Features({"image": datasets.Image(), "label": names})
    from PIL import Image

    rows = {"image": [Image.fromarray(one.astype(np.uint8)) for one in pixels], "label": labels}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder))
    return folder
