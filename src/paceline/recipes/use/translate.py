"""Translate with a trained model: ``paceline translate RUN SENTENCE…``, or from standard input.

Prints one translation a line, in the order of the sentences.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from paceline import train
from paceline.recipes.argv import check_at_least, run_command
from paceline.recipes.tokens import padded, source_rows
from paceline.recipes.transformer import DecoderLayer, Search, Transformer, decode
from paceline.recipes.use import TranslateOptions, prompt_texts
from paceline.recipes.use.evaluate import local_session
from paceline.recipes.use.onnx_file import OnnxNetwork
from paceline.recipes.use.translation import NAMES, TrainedTranslator, load_trained
from paceline.spec.errors import SettingError
from paceline.spec.terminal import clean

BATCH = 32
"""Sentences of standard input that are translated at once."""


def translate(options: TranslateOptions) -> None:
    """Prints the translations."""
    check_at_least("--beam", options.beam, 0)
    model = load_trained(options.run)
    given = prompt_texts(options.sentences) or (line.rstrip("\n") for line in sys.stdin)
    if options.attention and not prompt_texts(options.sentences):
        raise SettingError(
            "--attention draws sentences that are typed",
            remedy='paceline translate RUN --attention maps.png "a sentence"',
        )
    with local_session(options.device, model.config) as session:
        network, search = network_of(session, model, options)
        for chunk in _chunks(given, BATCH if sys.stdin and not sys.stdin.isatty() else 1):
            for line in translations(session, network, model, search, chunk):
                print(clean(line), flush=True)
        if options.attention:
            draw(session, network, model, search, options)


def network_of(
    session: train.Session, model: TrainedTranslator, options: TranslateOptions
) -> tuple[nn.Module, Search]:
    """Returns the trained network, or that of an ONNX file, and the settings of the search."""
    if not options.onnx:
        return model.load(session).eval(), model.search(options.beam)
    if options.beam > 1 or options.attention:
        flag = f"--beam {options.beam}" if options.beam > 1 else "--attention"
        raise SettingError(
            f"{flag} cannot be combined with --onnx",
            found="with a file, the likeliest token is taken every time",
            remedy="leave out one of the two",
        )
    return OnnxNetwork(Path(options.onnx), NAMES, model.config), model.search(beam=1)


def translations(
    session: train.Session,
    network: nn.Module,
    model: TrainedTranslator,
    search: Search,
    texts: Sequence[str],
) -> list[str]:
    """Translates each text; an empty one stays empty."""
    limit = model.config["seq_len"]
    texts_in = [text for text in texts if text.strip()]
    if not texts_in:
        return ["" for _ in texts]
    _warn_truncated(model.source.encode(texts_in), limit)
    source = padded(source_rows(model.source, texts_in, limit)).to(session.device)
    with session.autocast():
        outputs = iter(model.target.decode(decode(network, source, search)))
    return [next(outputs).replace("\n", " ") if text.strip() else "" for text in texts]


def _warn_truncated(rows: Iterable[Sequence[int]], limit: int) -> None:
    for row in rows:
        if len(row) > limit:
            text = f"a sentence of {len(row)} tokens was cut to the model's limit of {limit}"
            print(f"paceline: {text}", file=sys.stderr)


def _chunks(items: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


@torch.inference_mode()
def draw(
    session: train.Session,
    network: nn.Module,
    model: TrainedTranslator,
    search: Search,
    options: TranslateOptions,
) -> None:
    """Saves the attention of the last decoder layer for the first sentence as an image."""
    source = source_rows(model.source, options.sentences[:1], model.config["seq_len"])
    assert isinstance(network, Transformer)
    target = decode(network, padded(source).to(session.device), search)[0]
    weights = attention_maps(network, source[0], target, search, session.device)
    rows = [*model.target.tokens(target), "[EOS]"]
    columns = [*model.source.tokens(source[0][:-1]), "[EOS]"]
    draw_maps(weights, rows, columns).save(options.attention)


main = partial(run_command, translate, TranslateOptions, "paceline translate")


CELL, LABEL, GAP = 18, 90, 16  # pixels


def attention_maps(
    network: Transformer,
    source: Sequence[int],
    target: Sequence[int],
    search: Search,
    device: torch.device,
) -> Tensor:
    """Returns the last layer's attention to the source, shape ``[heads, t, s]``.

    Args:
        source: Token ids, with end.
        target: Token ids without start and end; row ``i`` belongs to the choice of token ``i``,
            the last row to that of the end.
    """
    layer = network.decoder[-1]
    assert isinstance(layer, DecoderLayer)
    layer.cross.keeps_weights = True
    decoder_input = torch.tensor([[search.start, *target]], device=device)
    network(torch.tensor([list(source)], device=device), decoder_input)
    layer.cross.keeps_weights = False
    weights, layer.cross.weights = layer.cross.weights, None
    assert weights is not None
    return weights[0].float().cpu()


def draw_maps(weights: Tensor, rows: Sequence[str], columns: Sequence[str]) -> Image.Image:
    """Draws the attention of each head as a map, two in a row: the darker, the more weight.

    Args:
        weights: Between 0 and 1, shape ``[heads, rows, columns]``.
        rows, columns: Labels: tokens of the translation, and of the sentence.
    """
    heads, height, width = weights.shape
    tile = (LABEL + width * CELL + GAP, LABEL + height * CELL + GAP)
    across = min(2, heads)
    page = Image.new("L", (across * tile[0], -(-heads // across) * tile[1]), 255)
    for head in range(heads):
        place = (head % across * tile[0], head // across * tile[1])
        page.paste(_tile(weights[head], rows, columns, f"head {head + 1}"), place)
    return page


def _tile(weights: Tensor, rows: Sequence[str], columns: Sequence[str], title: str) -> Image.Image:
    height, width = weights.shape
    tile = Image.new("L", (LABEL + width * CELL + GAP, LABEL + height * CELL + GAP), 255)
    shades = (255 - 255 * weights.clamp(0, 1)).numpy().astype(np.uint8)
    cells = Image.fromarray(shades).resize((width * CELL, height * CELL), Image.Resampling.NEAREST)
    tile.paste(cells, (LABEL, LABEL))
    draw, font = ImageDraw.Draw(tile), ImageFont.load_default(11)
    draw.text((2, 2), title, 0, font)
    rows, columns = ([token.replace("▁", "_") for token in side] for side in (rows, columns))
    for number, text in enumerate(rows):
        draw.text((LABEL - 4, LABEL + number * CELL + 9), text[:12], 0, font, anchor="rm")
    for number, text in enumerate(columns):
        tile.paste(_upright(text[:12], font), (LABEL + number * CELL, 0))
    return tile


def _upright(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> Image.Image:
    label = Image.new("L", (LABEL - 4, CELL), 255)
    ImageDraw.Draw(label).text((0, CELL // 2), text, 0, font, anchor="lm")
    return label.rotate(90, expand=True)


if __name__ == "__main__":
    sys.exit(main())
