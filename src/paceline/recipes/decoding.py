"""From a source sentence to a target sentence: greedy and beam search."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.recipes.transformer import PAD, Cache, Transformer


@dataclass(frozen=True, slots=True)
class Search:
    """How to search.

    Attributes:
        start: First token of every target sentence.
        end: Its last token.
        limit: Most tokens of a translation; it is also bounded by the source's length.
        beam: Beams; 1 takes the likeliest token every time.
        length_penalty: Power of the length by which a beam's score is divided; above 0 it
            favours longer translations.
    """

    start: int
    end: int
    limit: int
    beam: int = 1
    length_penalty: float = 0.6

    def longest(self, source: Tensor) -> int:
        """Steps of the search for these sources, shape ``[n, s]``."""
        return min(self.limit, 2 * source.shape[1] + 50)


@torch.inference_mode()
def decode(model: Transformer, source: Tensor, search: Search) -> list[list[int]]:
    """Target tokens of each source sentence, without start, end and padding."""
    found = greedy(model, source, search) if search.beam == 1 else beams(model, source, search)
    return [_until(row, search.end) for row in found.tolist()]


def greedy(model: Transformer, source: Tensor, search: Search) -> Tensor:
    """The likeliest token every time, shape ``[n, steps]``."""
    memory, mask = model.encode(source)
    last = torch.full((len(source),), search.start, device=source.device)
    cache, ended, chosen = Cache(), torch.zeros_like(last, dtype=torch.bool), []
    for _ in range(search.longest(source)):
        last = model.step(last, memory, mask, cache).argmax(1).masked_fill(ended, PAD)
        chosen.append(last)
        ended |= last == search.end
        if bool(ended.all()):
            break
    return torch.stack(chosen, 1)


def beams(model: Transformer, source: Tensor, search: Search) -> Tensor:
    """The best of ``search.beam`` beams for each sentence, shape ``[n, steps]``.

    An ended beam keeps its place with its score while others go on.
    """
    n, k = len(source), search.beam
    memory, mask = (part.repeat_interleave(k, 0) for part in model.encode(source))
    rows = torch.arange(n, device=source.device)[:, None] * k
    scores = torch.full((n, k), -math.inf, device=source.device)
    scores[:, 0] = 0  # all beams start equal: only one may go on
    tokens = torch.full((n, k, 1), search.start, device=source.device)
    cache = Cache()
    for _ in range(search.longest(source)):
        logits = model.step(tokens[:, :, -1].flatten(), memory, mask, cache)
        scores, choice = _next(logits.view(n, k, -1), scores, tokens[:, :, -1], search.end)
        beam, token = choice // logits.shape[1], choice % logits.shape[1]
        cache.select((rows + beam).flatten())
        tokens = torch.cat((tokens.gather(1, _wide(beam, tokens)), token[:, :, None]), 2)
        if bool(((token == search.end) | (token == PAD)).all()):
            break
    lengths = (tokens != PAD).sum(2) - 1
    best = (scores / lengths**search.length_penalty).argmax(1)
    return tokens[torch.arange(n), best, 1:]


def _next(logits: Tensor, scores: Tensor, last: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Scores and flat choices of the best continuations, each ``[n, k]``."""
    chances = logits.float().log_softmax(2)
    ended = ((last == end) | (last == PAD))[:, :, None]
    chances = chances.masked_fill(ended, -math.inf)
    chances[:, :, PAD] = torch.where(ended[:, :, 0], 0.0, -math.inf)
    total = (scores[:, :, None] + chances).flatten(1)
    best = total.topk(scores.shape[1], 1)
    return best.values, best.indices


def _wide(beam: Tensor, tokens: Tensor) -> Tensor:
    return beam[:, :, None].expand(-1, -1, tokens.shape[2])


def _until(row: list[int], end: int) -> list[int]:
    tokens = row[: row.index(end)] if end in row else row
    return [token for token in tokens if token != PAD]
