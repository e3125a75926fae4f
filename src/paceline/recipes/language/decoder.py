"""A decoder-only transformer, with the architecture and the names of Llama in transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

HEAD_WIDTH = 64
"""Width of an attention head, for which fast kernels are made."""
INITIAL_DEVIATION = 0.02
ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of a network.

    Attributes:
        depth: Number of layers.
        vocabulary: Number of tokens.
        length: Largest number of tokens of a text.
    """

    depth: int
    vocabulary: int
    length: int

    @property
    def heads(self) -> int:
        """Attention heads: one more for each layer, so that width and depth grow together."""
        return self.depth

    @property
    def groups(self) -> int:
        """Heads of keys and values: one for two heads, or for three, which saves memory in use."""
        return next((self.heads // size for size in (2, 3) if self.heads % size == 0), self.heads)

    @property
    def width(self) -> int:
        return self.heads * HEAD_WIDTH

    @property
    def hidden(self) -> int:
        """Width inside a feed-forward layer.

        SwiGLU has three matrices instead of two: with two thirds of the usual four widths it has as
        many parameters (Shazeer 2020). Rounded to multiples of 64.
        """
        return -(-8 * self.width // (3 * 64)) * 64

    @property
    def parameters(self) -> int:
        """Number of parameters, those of the embedding included."""
        attention = 2 * self.width**2 + 2 * self.width * self.groups * HEAD_WIDTH
        layer = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.vocabulary * self.width + self.depth * layer + self.width

    def config(self, end_token: int) -> dict[str, Any]:
        """Returns the description by which transformers builds this network."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": HEAD_WIDTH,
            "max_position_embeddings": self.length,
            "rms_norm_eps": NORM_EPSILON,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
            "rope_theta": ROPE_BASE,  # its name before transformers 5
            "tie_word_embeddings": True,
            "bos_token_id": end_token,
            "eos_token_id": end_token,
        }


class Attention(nn.Module):
    """Causal self-attention with rotary positions, in which heads share keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.groups = shape.heads, shape.groups
        shared_width = shape.groups * HEAD_WIDTH
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shared_width, bias=False)
        self.v_proj = nn.Linear(shape.width, shared_width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        queries, keys, values = (
            projected.view(rows, length, -1, HEAD_WIDTH).transpose(1, 2)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        mixed = scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=self.groups < self.heads
        )
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1)))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of features by the angle of their position (Su et al. 2021)."""
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


class FeedForward(nn.Module):
    """A feed-forward layer with a gate (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """Attention and a feed-forward layer, each of which adds to its normalised input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, NORM_EPSILON)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, NORM_EPSILON)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Body(nn.Module):
    """Embedding, layers, and the norm after them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.width, NORM_EPSILON)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.norm(x))


class Decoder(nn.Module):
    """Scores of the next token; the embedding of tokens is the output layer, too."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Body(shape)
        frequencies = ROPE_BASE ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
        angles = torch.arange(shape.length)[:, None] * frequencies.repeat(2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # at the start, every layer passes on its input
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=INITIAL_DEVIATION)

    def matrices(self) -> list[nn.Parameter]:
        """Returns the weights of all linear layers."""
        return [parameter for parameter in self.model.layers.parameters() if parameter.ndim == 2]

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the scores of the next token, shape ``[rows, length, vocabulary]``."""
        length = tokens.shape[1]
        x = self.model(tokens, self.cos[:length], self.sin[:length])
        return linear(x, self.model.embed_tokens.weight)
