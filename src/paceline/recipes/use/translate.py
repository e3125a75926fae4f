"""Translate with a trained model: ``paceline translate RUN SENTENCE…``, or from standard input.

Standard output holds one translation a line, in the order of the sentences, and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from paceline import train
from paceline.program import guarded
from paceline.recipes.argv import at_least, parse
from paceline.recipes.tokens import padded, source_rows
from paceline.recipes.transformer import DecoderLayer, Search, Transformer, decode
from paceline.recipes.use import TranslateOptions
from paceline.recipes.use.evaluate import alone
from paceline.recipes.use.onnx_file import OnnxNetwork
from paceline.recipes.use.translation import NAMES, Translator, translator
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
        network, search = network_of(session, model, options)
        for chunk in _chunks(given, TOGETHER if sys.stdin and not sys.stdin.isatty() else 1):
            for line in translations(session, network, model, search, chunk):
                print(line, flush=True)
        if options.attention:
            draw(session, network, model, search, options)


def network_of(
    session: train.Session, model: Translator, options: TranslateOptions
) -> tuple[nn.Module, Search]:
    """The trained network, or that of a file, and how to search with it.

    Raises:
        SettingError: The file's network can do less than is asked for.
    """
    if not options.onnx:
        network = session.place(model.network()).eval()
        train.load_weights(model.folder, network)
        return network, model.search(options.beam)
    refused = {f"--beam {options.beam}": options.beam > 1, "--attention": bool(options.attention)}
    if flag := next((flag for flag, asked in refused.items() if asked), ""):
        raise SettingError(
            f"{flag} does not go with --onnx",
            found="with a file, the likeliest token is taken every time",
            remedy="leave out one of the two",
        )
    return OnnxNetwork(Path(options.onnx), NAMES), model.search(beam=1)


def translations(
    session: train.Session,
    network: nn.Module,
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
    network: nn.Module,
    model: Translator,
    search: Search,
    options: TranslateOptions,
) -> None:
    """Keeps the first sentence's attention of the last decoder layer as a picture."""

    source = source_rows(model.source, options.sentences[:1], model.config["seq_len"])
    assert isinstance(network, Transformer)
    target = decode(network, padded(source).to(session.device), search)[0]
    seen = maps(network, source[0], target, search, session.device)
    rows = [*model.target.tokens(target), "[EOS]"]
    columns = [*model.source.tokens(source[0][:-1]), "[EOS]"]
    picture(seen, rows, columns).save(options.attention)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the translation in this process; returns the exit status."""
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: translate(parse(TranslateOptions, flags, "paceline translate")))


CELL, LABEL, GAP = 18, 90, 16  # pixels


def maps(
    network: Transformer,
    source: Sequence[int],
    target: Sequence[int],
    search: Search,
    device: torch.device,
) -> Tensor:
    """Weights of the last layer's attention to the source, shape ``[heads, t, s]``.

    Args:
        network: In evaluation mode.
        source: Token ids, end included.
        target: Token ids without start and end; row ``i`` is the choice of target token ``i``,
            the last row that of the end.
        search: Names the start token.
        device: Where the network is.
    """
    layer = network.decoder[-1]
    assert isinstance(layer, DecoderLayer)
    layer.cross.look = True
    given = torch.tensor([[search.start, *target]], device=device)
    network(torch.tensor([list(source)], device=device), given)
    layer.cross.look = False
    seen, layer.cross.seen = layer.cross.seen, None
    assert seen is not None
    return seen[0].float().cpu()


def picture(seen: Tensor, rows: Sequence[str], columns: Sequence[str]) -> Image.Image:
    """One map for each head, two beside each other; dark is much."""
    heads, height, width = seen.shape
    tile = (LABEL + width * CELL + GAP, LABEL + height * CELL + GAP)
    across = min(2, heads)
    page = Image.new("L", (across * tile[0], -(-heads // across) * tile[1]), 255)
    for head in range(heads):
        place = (head % across * tile[0], head // across * tile[1])
        page.paste(_tile(seen[head], rows, columns, f"head {head + 1}"), place)
    return page


def _tile(seen: Tensor, rows: Sequence[str], columns: Sequence[str], title: str) -> Image.Image:
    height, width = seen.shape
    tile = Image.new("L", (LABEL + width * CELL + GAP, LABEL + height * CELL + GAP), 255)
    shades = (255 - 255 * seen.clamp(0, 1)).numpy().astype(np.uint8)
    cells = Image.fromarray(shades).resize((width * CELL, height * CELL), Image.Resampling.NEAREST)
    tile.paste(cells, (LABEL, LABEL))
    draw, font = ImageDraw.Draw(tile), ImageFont.load_default(11)
    draw.text((2, 2), title, 0, font)
    rows, columns = ([one.replace("▁", "_") for one in side] for side in (rows, columns))
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
