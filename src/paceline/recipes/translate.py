"""Translate with a trained model: ``paceline translate RUN SENTENCE…``, or from standard input.

Standard output holds one translation a line, in the order of the sentences, and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch

from paceline import train
from paceline.recipes.decoding import Search, decode
from paceline.recipes.evaluate import alone
from paceline.recipes.evaluate_options import TranslateOptions
from paceline.recipes.options import at_least, parse
from paceline.recipes.running import guarded
from paceline.recipes.sentences import padded, source_rows
from paceline.recipes.transformer import Transformer
from paceline.recipes.translated import Translator, translator
from paceline.spec.errors import SettingError

TOGETHER = 32
"""Sentences that are translated at once when they come from standard input."""


def translate(options: TranslateOptions) -> None:
    """Prints the translations."""
    at_least("--beam", options.beam, 0)
    if not options.run:
        raise SettingError("--run is missing", remedy="--run runs/translation-…")
    model = translator(Path(options.run))
    given = options.sentences or _lines()
    if options.attention and not options.sentences:
        raise SettingError(
            "--attention draws sentences that are typed",
            remedy='paceline translate RUN --attention maps.png "a sentence"',
        )
    with alone(options.device, model.config) as session:
        network = session.place(model.network()).eval()
        train.load_weights(model.folder, network)
        assert isinstance(network, Transformer)
        search = model.search(options.beam)
        for chunk in _chunks(given, TOGETHER if sys.stdin and not sys.stdin.isatty() else 1):
            for line in translations(session, network, model, search, chunk):
                print(line, flush=True)
        if options.attention:
            draw(session, network, model, search, options)


def translations(
    session: train.Session,
    network: Transformer,
    model: Translator,
    search: Search,
    texts: Sequence[str],
) -> list[str]:
    """The translation of each text; an empty one stays empty."""
    limit = model.config["seq_len"]
    wanted = [text for text in texts if text.strip()]
    if not wanted:
        return ["" for _ in texts]
    _warn_of_long(model.source.encode(wanted), limit)
    source = padded(source_rows(model.source, wanted, limit)).to(session.device)
    with session.autocast():
        made = iter(model.target.decode(decode(network, source, search)))
    return [next(made).replace("\n", " ") if text.strip() else "" for text in texts]


def _warn_of_long(rows: Iterable[Sequence[int]], limit: int) -> None:
    for row in rows:
        if len(row) > limit:
            text = f"a sentence of {len(row)} tokens was cut to the model's limit of {limit}"
            print(f"paceline: {text}", file=sys.stderr)


def _lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\n")


def _chunks(items: Iterable[str], size: int) -> Iterator[list[str]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


@torch.inference_mode()
def draw(
    session: train.Session,
    network: Transformer,
    model: Translator,
    search: Search,
    options: TranslateOptions,
) -> None:
    """Keeps the first sentence's attention of the last decoder layer as a picture."""
    from paceline.recipes.attention_maps import maps, picture

    source = source_rows(model.source, options.sentences[:1], model.config["seq_len"])
    target = decode(network, padded(source).to(session.device), search)[0]
    seen = maps(network, source[0], target, search, session.device)
    rows = [*model.target.tokens(target), "[EOS]"]
    columns = [*model.source.tokens(source[0][:-1]), "[EOS]"]
    picture(seen, rows, columns).save(options.attention)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the translation in this process; returns the exit status."""
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: translate(parse(TranslateOptions, flags, "paceline translate")))


if __name__ == "__main__":
    sys.exit(main())
