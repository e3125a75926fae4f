"""The encoder-decoder transformer, with a cache of keys and values for decoding.

Shapes: ``n`` sentences, ``s`` source and ``t`` target tokens, ``d`` the model's width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

PAD = 0
"""Token id of padding in every vocabulary."""


@dataclass(frozen=True)
class Shape:
    """What makes two transformers fit the same weights.

    Attributes:
        source: Tokens of the source vocabulary.
        target: Tokens of the target vocabulary.
        width: Features of each token (d_model).
        layers: Layers of the encoder, and of the decoder.
        heads: Attention heads.
        ff: Width of the feed-forward layers.
        pre_norm: Layer normalisation before each part instead of after it.
        dropout: In training.
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
    """Keys and values of what has been decoded, for each layer of the decoder.

    Attributes:
        length: Target tokens so far.
        own: Of the target tokens so far, by layer.
        cross: Of the source, by layer; made once.
    """

    length: int = 0
    own: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    cross: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def select(self, rows: Tensor) -> None:
        """Keeps these sentences (or beams), in this order."""
        for kept in (self.own, self.cross):
            for layer, (keys, values) in kept.items():
                kept[layer] = keys[rows], values[rows]


class Attention(nn.Module):
    """Multi-head attention. After a forward with ``look`` the weights are in ``seen``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.dropout = shape.heads, shape.dropout
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.look = False
        self.seen: Tensor | None = None

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of shape ``[n, heads, s, d / heads]``."""
        return self._split(self.key(memory)), self._split(self.value(memory))

    def forward(
        self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor | None, causal: bool = False
    ) -> Tensor:
        """``x`` attends to ``memory`` where ``mask`` is true; ``causal``: to nothing later."""
        query, (keys, values) = self._split(self.query(x)), memory
        if self.look:
            self.seen = _weights(query, keys, mask)
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
    """Normalisation, dropout and the sum around a part of a layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.pre, self.dropout = nn.LayerNorm(shape.width), shape.pre_norm, shape.dropout

    def before(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x) if self.pre else x
        return normed

    def after(self, x: Tensor, part: Tensor) -> Tensor:
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
        normed = self.around_attention.before(x)
        mixed = self.attention(normed, self.attention.project(normed), mask)
        x = self.around_attention.after(x, mixed)
        return self.around_ff.after(x, self.ff(self.around_ff.before(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source, and feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.around_attention = Attention(shape), Residual(shape)
        self.cross, self.around_cross = Attention(shape), Residual(shape)
        self.ff, self.around_ff = FeedForward(shape), Residual(shape)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """All target tokens at once."""
        normed = self.around_attention.before(x)
        mixed = self.attention(normed, self.attention.project(normed), None, causal=True)
        x = self.around_attention.after(x, mixed)
        return self._rest(x, self.cross.project(memory), mask)

    def step(self, x: Tensor, memory: Tensor, mask: Tensor, cache: Cache, number: int) -> Tensor:
        """The next target token of each sentence, shape ``[n, 1, d]``."""
        normed = self.around_attention.before(x)
        own = self.attention.project(normed)
        if number in cache.own:
            old = cache.own[number]
            own = torch.cat((old[0], own[0]), 2), torch.cat((old[1], own[1]), 2)
        cache.own[number] = own
        x = self.around_attention.after(x, self.attention(normed, own, None))
        if number not in cache.cross:
            cache.cross[number] = self.cross.project(memory)
        return self._rest(x, cache.cross[number], mask)

    def _rest(self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = self.around_cross.after(x, self.cross(self.around_cross.before(x), memory, mask))
        return self.around_ff.after(x, self.ff(self.around_ff.before(x)))


class Embedding(nn.Module):
    """Tokens as vectors, plus the sinusoids of their positions."""

    def __init__(self, tokens: int, shape: Shape) -> None:
        super().__init__()
        self.table, self.dropout = nn.Embedding(tokens, shape.width), shape.dropout
        nn.init.normal_(self.table.weight, std=shape.width**-0.5)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        """Vectors ``[n, t, d]`` of tokens ``[n, t]`` that stand at ``start`` and after."""
        width = self.table.embedding_dim
        vectors = self.table(ids) * math.sqrt(width)
        vectors = vectors + sinusoids(start, ids.shape[1], width).to(vectors)
        return dropout(vectors, self.dropout, self.training)


def sinusoids(start: int, count: int, width: int) -> Tensor:
    """Position vectors, shape ``[count, width]``; computed, so that no length is too long."""
    positions = torch.arange(start, start + count, dtype=torch.float64)
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(1e4) / width))
    angles = positions[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)


class Transformer(nn.Module):
    """The whole network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.source, self.target = Embedding(shape.source, shape), Embedding(shape.target, shape)
        self.encoder = nn.ModuleList(EncoderLayer(shape) for _ in range(shape.layers))
        self.decoder = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        ends = nn.LayerNorm if shape.pre_norm else nn.Identity
        self.encoder_end, self.decoder_end = ends(shape.width), ends(shape.width)
        self.words = nn.Linear(shape.width, shape.target)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Scores of the token after each target token, shape ``[n, t, vocabulary]``."""
        memory, mask = self.encode(source)
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        scores: Tensor = self.words(self.decoder_end(x))
        return scores

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """What the decoder looks at, ``[n, s, d]``, and where it may look, ``[n, 1, 1, s]``."""
        mask = (source != PAD)[:, None, None, :]
        x = self.source(source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_end(x), mask

    def step(self, last: Tensor, memory: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """Scores of the next token, ``[n, vocabulary]``, after the tokens ``last``, ``[n]``."""
        x = self.target(last[:, None], cache.length)
        for number, layer in enumerate(self.decoder):
            assert isinstance(layer, DecoderLayer)
            x = layer.step(x, memory, mask, cache, number)
        cache.length += 1
        scores: Tensor = self.words(self.decoder_end(x))[:, 0]
        return scores


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
def decode(model: nn.Module, source: Tensor, search: Search) -> list[list[int]]:
    """Target tokens of each source sentence, without start, end and padding.

    Args:
        model: A :class:`Transformer`; or any network of its inputs and scores, which is then
            asked anew for the whole sentence at every token, and only greedily.
        source: Token ids, shape ``[n, s]``.
        search: How to search.
    """
    if not isinstance(model, Transformer):
        found = anew(model, source, search)
    else:
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


def anew(model: nn.Module, source: Tensor, search: Search) -> Tensor:
    """As :func:`greedy`, with a network that keeps nothing from token to token."""
    tokens = torch.full((len(source), 1), search.start, device=source.device)
    ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    for _ in range(search.longest(source)):
        last = model(source, tokens)[:, -1].argmax(1).masked_fill(ended, PAD)
        tokens = torch.cat((tokens, last[:, None]), 1)
        ended |= last == search.end
        if bool(ended.all()):
            break
    return tokens[:, 1:]


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
