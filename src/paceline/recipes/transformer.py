"""The encoder-decoder transformer, with a cache of keys and values for decoding.

Shapes: ``n`` sentences, ``s`` source and ``t`` target tokens, ``d`` the model's width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

PAD = 0
"""Token id of padding in every vocabulary."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer. Weights fit all transformers of equal shape.

    Attributes:
        source: Tokens of the source vocabulary.
        target: Tokens of the target vocabulary.
        width: Features of each token (d_model).
        layers: Layers of the encoder, and of the decoder.
        ff: Width of the feed-forward layers.
        pre_norm: Layer normalisation before each part instead of after it.
    """

    source: int
    target: int
    width: int
    layers: int
    heads: int
    ff: int
    pre_norm: bool = True
    dropout: float = 0.0


@dataclass
class Cache:
    """Keys and values of decoded tokens, for each layer of the decoder.

    Attributes:
        decoded: Keys and values of the decoded tokens, by layer.
        cross: Keys and values of the source, by layer.
    """

    length: int = 0
    decoded: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    cross: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def select(self, rows: Tensor) -> None:
        """Selects sentences (or beams), in this order."""
        for entries in (self.decoded, self.cross):
            for layer, (keys, values) in entries.items():
                entries[layer] = keys[rows], values[rows]


class Attention(nn.Module):
    """Multi-head attention. If ``keeps_weights``, forward stores the weights in ``weights``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.dropout = shape.heads, shape.dropout
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.keeps_weights = False
        self.weights: Tensor | None = None

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of shape ``[n, heads, s, d / heads]``."""
        return self._split(self.key(memory)), self._split(self.value(memory))

    def forward(
        self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor | None, causal: bool = False
    ) -> Tensor:
        """Attends to ``memory`` where ``mask`` is true; ``causal``: not to later tokens."""
        query, (keys, values) = self._split(self.query(x)), memory
        if self.keeps_weights:
            self.weights = _weights(query, keys, mask)
        rate = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, dropout_p=rate, is_causal=causal
        )
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined

    def _split(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        return x.view(n, t, self.heads, width // self.heads).transpose(1, 2)


def _weights(query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    scores = query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1).detach()


class Residual(nn.Module):
    """Normalisation, dropout and residual connection around a part of a layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.pre, self.dropout = nn.LayerNorm(shape.width), shape.pre_norm, shape.dropout

    def normalise(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x) if self.pre else x
        return normed

    def add(self, x: Tensor, part: Tensor) -> Tensor:
        total = x + dropout(part, self.dropout, self.training)
        return total if self.pre else self.norm(total)


class FeedForward(nn.Sequential):
    """Two linear layers, applied to each token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(
            nn.Linear(shape.width, shape.ff),
            nn.ReLU(),
            nn.Dropout(shape.dropout),
            nn.Linear(shape.ff, shape.width),
        )


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.around_attention = Attention(shape), Residual(shape)
        self.ff, self.around_ff = FeedForward(shape), Residual(shape)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.around_attention.normalise(x)
        mixed = self.attention(normed, self.attention.project(normed), mask)
        x = self.around_attention.add(x, mixed)
        return self.around_ff.add(x, self.ff(self.around_ff.normalise(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source, and feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.around_attention = Attention(shape), Residual(shape)
        self.cross, self.around_cross = Attention(shape), Residual(shape)
        self.ff, self.around_ff = FeedForward(shape), Residual(shape)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Decodes all target tokens at once."""
        normed = self.around_attention.normalise(x)
        mixed = self.attention(normed, self.attention.project(normed), None, causal=True)
        x = self.around_attention.add(x, mixed)
        return self._cross_attend(x, self.cross.project(memory), mask)

    def step(self, x: Tensor, memory: Tensor, mask: Tensor, cache: Cache, number: int) -> Tensor:
        """Decodes the next target token of each sentence, shape ``[n, 1, d]``."""
        normed = self.around_attention.normalise(x)
        projected = self.attention.project(normed)
        if number in cache.decoded:
            previous = cache.decoded[number]
            projected = (
                torch.cat((previous[0], projected[0]), 2),
                torch.cat((previous[1], projected[1]), 2),
            )
        cache.decoded[number] = projected
        x = self.around_attention.add(x, self.attention(normed, projected, None))
        if number not in cache.cross:
            cache.cross[number] = self.cross.project(memory)
        return self._cross_attend(x, cache.cross[number], mask)

    def _cross_attend(self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = self.around_cross.add(x, self.cross(self.around_cross.normalise(x), memory, mask))
        return self.around_ff.add(x, self.ff(self.around_ff.normalise(x)))


class Embedding(nn.Module):
    """Token embeddings plus sinusoidal position embeddings."""

    def __init__(self, tokens: int, shape: Shape) -> None:
        super().__init__()
        self.table, self.dropout = nn.Embedding(tokens, shape.width), shape.dropout
        nn.init.normal_(self.table.weight, std=shape.width**-0.5)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        """Embeds tokens ``[n, t]`` at positions from ``start`` on, to ``[n, t, d]``."""
        width = self.table.embedding_dim
        vectors = self.table(ids) * math.sqrt(width)
        vectors = vectors + sinusoids(start, ids.shape[1], width).to(vectors)
        return dropout(vectors, self.dropout, self.training)


def sinusoids(start: int, count: int, width: int) -> Tensor:
    """Computes position embeddings, shape ``[count, width]``, for any length."""
    positions = torch.arange(start, start + count, dtype=torch.float64)
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(1e4) / width))
    angles = positions[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)


class Transformer(nn.Module):
    """Encoder-decoder transformer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.source, self.target = Embedding(shape.source, shape), Embedding(shape.target, shape)
        self.encoder = nn.ModuleList(EncoderLayer(shape) for _ in range(shape.layers))
        self.decoder = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        final_norm = nn.LayerNorm if shape.pre_norm else nn.Identity
        self.encoder_end, self.decoder_end = final_norm(shape.width), final_norm(shape.width)
        self.words = nn.Linear(shape.width, shape.target)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Returns scores of the token after each target token, shape ``[n, t, vocabulary]``."""
        memory, mask = self.encode(source)
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        scores: Tensor = self.words(self.decoder_end(x))
        return scores

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes the source to ``[n, s, d]``; the mask ``[n, 1, 1, s]`` is false for padding."""
        mask = (source != PAD)[:, None, None, :]
        x = self.source(source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_end(x), mask

    def step(self, tokens: Tensor, memory: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """Returns scores ``[n, vocabulary]`` of the token after ``tokens``, ``[n]``."""
        x = self.target(tokens[:, None], cache.length)
        for number, layer in enumerate(self.decoder):
            assert isinstance(layer, DecoderLayer)
            x = layer.step(x, memory, mask, cache, number)
        cache.length += 1
        scores: Tensor = self.words(self.decoder_end(x))[:, 0]
        return scores


@dataclass(frozen=True, slots=True)
class Search:
    """Settings of the search for a translation.

    Attributes:
        start: First token of every target sentence.
        end: Last token of every target sentence.
        limit: Maximum tokens of a translation, also bounded by the source's length.
        beam: Number of beams; 1 decodes greedily.
        length_penalty: A beam's score is divided by this power of its length; values above 0
            favour longer translations.
    """

    start: int
    end: int
    limit: int
    beam: int = 1
    length_penalty: float = 0.6

    def max_steps(self, source: Tensor) -> int:
        """Returns the maximum number of steps for sources of shape ``[n, s]``."""
        return min(self.limit, 2 * source.shape[1] + 50)


@torch.inference_mode()
def decode(model: nn.Module, source: Tensor, search: Search) -> list[list[int]]:
    """Returns the target tokens of each source sentence, without start, end and padding.

    Args:
        model: A :class:`Transformer`, or a network with its inputs and outputs, which decodes
            greedily and computes the whole sentence for each token.
        source: Token ids, shape ``[n, s]``.
    """
    if isinstance(model, Transformer) and search.beam > 1:
        rows = beam_search(model, source, search)
    else:
        rows = greedy(model, source, search)
    return [_strip(row, search.end) for row in rows.tolist()]


def greedy(model: nn.Module, source: Tensor, search: Search) -> Tensor:
    """Decodes greedily, to shape ``[n, steps]``; only a :class:`Transformer` has a cache."""
    cached_step: Callable[[Tensor], Tensor] | None = None
    if isinstance(model, Transformer):
        memory, mask = model.encode(source)
        cached_step = partial(model.step, memory=memory, mask=mask, cache=Cache())
    tokens = torch.full((len(source), 1), search.start, device=source.device)
    ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    for _ in range(search.max_steps(source)):
        scores = cached_step(tokens[:, -1]) if cached_step else model(source, tokens)[:, -1]
        token = scores.argmax(1).masked_fill(ended, PAD)
        tokens = torch.cat((tokens, token[:, None]), 1)
        ended |= token == search.end
        if bool(ended.all()):
            break
    return tokens[:, 1:]


def beam_search(model: Transformer, source: Tensor, search: Search) -> Tensor:
    """Returns the best of ``search.beam`` beams for each sentence, shape ``[n, steps]``.

    An ended beam keeps its score while others continue.
    """
    n, k = len(source), search.beam
    memory, mask = (part.repeat_interleave(k, 0) for part in model.encode(source))
    rows = torch.arange(n, device=source.device)[:, None] * k
    scores = torch.full((n, k), -math.inf, device=source.device)
    scores[:, 0] = 0  # all beams are equal: continue only one
    tokens = torch.full((n, k, 1), search.start, device=source.device)
    cache = Cache()
    for _ in range(search.max_steps(source)):
        logits = model.step(tokens[:, :, -1].flatten(), memory, mask, cache)
        scores, choice = _best_continuations(
            logits.view(n, k, -1), scores, tokens[:, :, -1], search.end
        )
        beam, token = choice // logits.shape[1], choice % logits.shape[1]
        cache.select((rows + beam).flatten())
        tokens = torch.cat(
            (tokens.gather(1, beam[:, :, None].expand_as(tokens)), token[:, :, None]), 2
        )
        if bool(((token == search.end) | (token == PAD)).all()):
            break
    lengths = (tokens != PAD).sum(2) - 1
    winners = (scores / lengths**search.length_penalty).argmax(1)
    return tokens[torch.arange(n), winners, 1:]


def _best_continuations(
    logits: Tensor, scores: Tensor, previous: Tensor, end: int
) -> tuple[Tensor, Tensor]:
    """Returns scores and flat indices of the best continuations, each ``[n, k]``."""
    chances = logits.float().log_softmax(2)
    ended = ((previous == end) | (previous == PAD))[:, :, None]
    chances = chances.masked_fill(ended, -math.inf)
    chances[:, :, PAD] = torch.where(ended[:, :, 0], 0.0, -math.inf)
    total = (scores[:, :, None] + chances).flatten(1)
    top = total.topk(scores.shape[1], 1)
    return top.values, top.indices


def _strip(row: list[int], end: int) -> list[int]:
    tokens = row[: row.index(end)] if end in row else row
    return [token for token in tokens if token != PAD]
