"""A small parallel corpus from the message catalogues of the installed Debian packages.

    python bench/recipes/catalogues.py corpus de pairs.tsv   # English, tab, German
    python bench/recipes/catalogues.py train de FOLDER       # train on it and check BLEU

The messages are short, often similar, and translated by people. Duplicates are removed before the
split, so no held-out sentence occurs in the training set.
"""

from __future__ import annotations

import gettext
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LOCALES = Path("/usr/share/locale")
MODEL = ("--d-model=128", "--layers=2", "--heads=4", "--ff=512", "--dropout=0.1")
TRAINING = ("--tokenizer=bpe", "--vocab-size=3000", "--seq-len=32", "--lr=2e-3", "--device=cpu")


def catalogue_pairs(language: str) -> Iterator[tuple[str, str]]:
    """Messages and their translations from every catalogue of a language."""
    for path in sorted((LOCALES / language / "LC_MESSAGES").glob("*.mo")):
        with path.open("rb") as file:
            try:
                messages = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
            except (OSError, UnicodeDecodeError):
                continue
        for source, target in messages.items():
            if isinstance(source, str) and source:
                yield source.split("\x04")[-1], target


def normalize(text: str) -> str:
    """The text as one line, without the markers of keyboard shortcuts."""
    return " ".join(re.sub(r"[_&](?=\w)", "", text).split())


def corpus(language: str) -> list[tuple[str, str]]:
    """Pairs whose source has 2 to 10 words, each source once."""
    translations: dict[str, str] = {}
    for pair in catalogue_pairs(language):
        source, target = map(normalize, pair)
        if 2 <= len(source.split()) <= 10 and target and source != target:
            translations.setdefault(source, target)
    return sorted(translations.items())


def train(language: str, folder: Path, epochs: int) -> None:
    """Train, print the scores, and compute BLEU again from the saved translations."""
    import sacrebleu

    from paceline.recipes import translation

    folder.mkdir(parents=True, exist_ok=True)
    pairs = corpus(language)
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    run = folder / "run"
    start = time.perf_counter()
    flags = [f"--data={folder / 'pairs.tsv'}", f"--run-dir={run}", f"--epochs={epochs}"]
    score_flag = f"--score-every={max(1, epochs // 4)}"
    assert translation.main([*flags, *MODEL, *TRAINING, score_flag, "--val-fraction=0.05"]) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    scores = [record for record in map(json.loads, lines) if "bleu" in record]
    rows = [json.loads(line) for line in (run / "translations.jsonl").read_text().splitlines()]
    repeated_bleu = sacrebleu.corpus_bleu(
        [row["translated"] for row in rows], [[row["expected"] for row in rows]]
    ).score
    print(f"pairs {len(pairs)}, seconds {time.perf_counter() - start:.0f}")
    for record in scores:
        print(f"epoch {record['epoch']}: bleu {record['bleu']:.2f} chrf {record['chrf']:.2f}")
    print(f"sacrebleu on the saved translations: {repeated_bleu:.2f}")
    assert repeated_bleu == scores[-1]["bleu"] > scores[0]["bleu"]


if __name__ == "__main__":
    action, language, target, *extra_arguments = sys.argv[1:]
    if action == "corpus":
        lines = (f"{a}\t{b}\n" for a, b in corpus(language))
        Path(target).write_text("".join(lines), encoding="utf-8")
    else:
        train(language, Path(target), int(extra_arguments[0]) if extra_arguments else 4)
