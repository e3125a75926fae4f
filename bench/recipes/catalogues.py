"""A small real parallel corpus: the message catalogues that the installed Debian packages bring.

    python bench/recipes/catalogues.py corpus de pairs.tsv   # English, tab, German
    python bench/recipes/catalogues.py train de FOLDER       # trains on it, checks BLEU

Messages are what programs say to people: short, many of them alike, and translated by hand.
Duplicates are removed before the split, so no held-out sentence was seen in training.
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
    """Messages with their translations, from every catalogue of a language."""
    for path in sorted((LOCALES / language / "LC_MESSAGES").glob("*.mo")):
        with path.open("rb") as file:
            try:
                messages = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
            except (OSError, UnicodeDecodeError):
                continue
        for source, target in messages.items():
            if isinstance(source, str) and source:
                yield source.split("\x04")[-1], target


def clean(text: str) -> str:
    """One line, without the markers of keyboard short cuts."""
    return " ".join(re.sub(r"[_&](?=\w)", "", text).split())


def corpus(language: str) -> list[tuple[str, str]]:
    """Sentences of 2 to 10 words, each source once."""
    found: dict[str, str] = {}
    for pair in catalogue_pairs(language):
        source, target = map(clean, pair)
        if 2 <= len(source.split()) <= 10 and target and source != target:
            found.setdefault(source, target)
    return sorted(found.items())


def train(language: str, folder: Path, epochs: int) -> None:
    """Trains, prints the course, and scores the kept translations again."""
    import sacrebleu

    from paceline.recipes import translation

    folder.mkdir(parents=True, exist_ok=True)
    pairs = corpus(language)
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    run = folder / "run"
    began = time.perf_counter()
    flags = [f"--data={folder / 'pairs.tsv'}", f"--run-dir={run}", f"--epochs={epochs}"]
    every = f"--score-every={max(1, epochs // 4)}"
    assert translation.main([*flags, *MODEL, *TRAINING, every, "--val-fraction=0.05"]) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    scored = [one for one in map(json.loads, lines) if "bleu" in one]
    rows = [json.loads(line) for line in (run / "translations.jsonl").read_text().splitlines()]
    again = sacrebleu.corpus_bleu(
        [row["translated"] for row in rows], [[row["expected"] for row in rows]]
    ).score
    print(f"pairs {len(pairs)}, seconds {time.perf_counter() - began:.0f}")
    for one in scored:
        print(f"epoch {one['epoch']}: bleu {one['bleu']:.2f} chrf {one['chrf']:.2f}")
    print(f"sacrebleu on the kept translations: {again:.2f}")
    assert again == scored[-1]["bleu"] > scored[0]["bleu"]


if __name__ == "__main__":
    what, language, target, *rest = sys.argv[1:]
    if what == "corpus":
        lines = (f"{a}\t{b}\n" for a, b in corpus(language))
        Path(target).write_text("".join(lines), encoding="utf-8")
    else:
        train(language, Path(target), int(rest[0]) if rest else 4)
