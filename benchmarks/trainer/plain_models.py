"""The two shapes written by hand on torch's own layers, as a person would who needs nothing else."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        if angles is not None:
            query, key = _rotate(query, *angles), _rotate(key, *angles)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), -1) * sin.to(x.dtype)


class _GPT2Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.attention = _Attention(dim, heads, bias=True)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class PlainGPT2(nn.Module):
    """Learned positions, tied head; returns the mean loss."""

    def __init__(self, size: dict[str, Any], vocab: int, length: int) -> None:
        super().__init__()
        dim = size["dim"]
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(_GPT2Block(dim, size["num_heads"]) for _ in range(size["num_layers"]))
        self.norm = nn.LayerNorm(dim)
        self.apply(_small)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _LlamaBlock(nn.Module):
    def __init__(self, dim: int, heads: int, mlp_dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(dim, 1e-6), nn.RMSNorm(dim, 1e-6)])
        self.attention = _Attention(dim, heads, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 2 * mlp_dim, bias=False), nn.Linear(mlp_dim, dim, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norms[0](x), angles)
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class PlainLlama(nn.Module):
    """Rotary positions, untied head; returns the mean loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: dict[str, Any], vocab: int, length: int) -> None:
        super().__init__()
        dim, heads = size["dim"], size["num_heads"]
        self.tokens = nn.Embedding(vocab, dim)
        blocks = (_LlamaBlock(dim, heads, size["mlp_dim"]) for _ in range(size["num_layers"]))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.RMSNorm(dim, 1e-6), nn.Linear(dim, vocab, bias=False)
        pairs = torch.arange(0, dim // heads, 2).float() / (dim // heads)
        angles = torch.outer(torch.arange(length).float(), 10000.0**-pairs).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(_small)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _small(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
