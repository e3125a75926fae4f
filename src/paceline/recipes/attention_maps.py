"""Pictures of what a translation looked at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from paceline.recipes.decoding import Search
from paceline.recipes.transformer import DecoderLayer, Transformer

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
