"""SASRec: causal self-attention over a history predicts the next item (Kang and McAuley, 2018)."""

from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.core.nn.attention import AttentionConfig
from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.context import Context, DropoutKey, dropout
from kitforge.core.nn.embedding_spec import EmbeddingLookup, RecommenderConfig, SampleShape, need
from kitforge.core.nn.mlp import MLPConfig
from kitforge.core.nn.stack import Stack
from kitforge.foundation.config import check, check_counts
from kitforge.foundation.device import copy_to

# The smallest width that histories are padded to; each further bucket is twice as wide.
MIN_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SASRecConfig(RecommenderConfig):
    """Sizes and options of a SASRec."""

    family: ClassVar[str] = "sasrec"
    logit: ClassVar[None] = None
    objective: ClassVar[str] = "sampled_softmax"
    sequence: str | None = None  # the sequence feature of item ids; None: the only one
    dim: int = 64  # embedding and hidden dimension
    num_layers: int = 2
    num_heads: int = 1
    mlp_dim: int | None = None  # None: dim
    max_length: int = 50  # the model reads so many last items of a history
    dropout: float = 0.2

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "mlp_dim", "max_length"):
            check_counts("model", {name: getattr(self, name)})
        divides = self.dim % self.num_heads == 0
        check(divides, "model.num_heads", self.num_heads, f"a divisor of model.dim={self.dim}")
        check(0 <= self.dropout < 1, "model.dropout", self.dropout, "at least 0, below 1")

    def lookups(self, shape: SampleShape) -> tuple[EmbeddingLookup, ...]:
        """The embeddings of the items, in order."""
        return (EmbeddingLookup(name="items", features=(self.items(shape),), dim=self.dim, pooling="sequence"),)

    def items(self, shape: SampleShape) -> str:
        """The sequence feature of item ids. Raises ConfigError where the data have none, or several."""
        sequence = self.sequence or (shape.sequences[0] if len(shape.sequences) == 1 else None)
        need("SASRec", shape, 1, "sequences")
        known = ", ".join(shape.sequences)
        check(sequence in shape.sequences, "model.sequence", sequence, f"the name of a sequence of the data: {known}")
        assert sequence is not None
        return sequence

    def dense_features(self, shape: SampleShape) -> tuple[str, ...]:
        """None: the network reads the history only."""
        return ()

    def block(self) -> BlockConfig:
        """The configuration of one layer."""
        attention = AttentionConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.dim // self.num_heads,
            qkv_bias=True,
            out_bias=True,
            dropout=self.dropout,
        )
        mlp = MLPConfig(dim=self.dim, hidden_dim=self.mlp_dim or self.dim, kind="gelu_tanh", bias=True)
        return BlockConfig(attention=attention, mlp=mlp, norm="layer", norm_eps=1e-8, dropout=self.dropout)


class SASRec(Stack):
    """Hidden states [B, L, dim] of item embeddings [B, L, dim]; the dot product of a state with an item's embedding is
    the logit of that item coming next. The layers are the shared block; the paper's normalize queries only.

    Histories are padded at the end, so the causal mask alone hides the padding. Positions are counted from the end of a
    history: the newest item always has the same position.
    """

    def __init__(self, config: SASRecConfig, shape: SampleShape, kernels: Kernels = REFERENCE) -> None:
        super().__init__()
        config.items(shape)
        self.config = config
        self.position = nn.Embedding(config.max_length, config.dim)
        self.add_blocks((config.block(),) * config.num_layers, kernels)

    def forward(self, items: Tensor, lengths: Tensor, dropout_key: DropoutKey | None = None) -> Tensor:
        """Hidden states; positions beyond `lengths` [B], on the CPU, change nothing before them.

        Histories are grouped into buckets of similar length, since most are much shorter than the longest. The bucket,
        and so the dropout mask, depends on a history's own length alone.
        """
        longest = items.shape[1]
        check(longest <= self.config.max_length, "data.sequence_length", longest, f"at most {self.config.max_length}")
        buckets = takewhile(lambda width: width < longest, (MIN_WIDTH * 2**power for power in count()))
        widths = torch.tensor([*buckets, longest], device=lengths.device)
        width_of = widths[torch.bucketize(lengths, widths)]
        parts, order = [], []
        for width in sorted(set(width_of.tolist())) or [longest]:
            rows = (width_of == width).nonzero().squeeze(1)
            samples = () if dropout_key is None else tuple(dropout_key.samples[row] for row in rows.tolist())
            of_rows = None if dropout_key is None else replace(dropout_key, samples=samples)
            context = Context(lengths=copy_to(lengths[rows].unsqueeze(1), items.device), dropout=of_rows)
            states = self.hidden(items[copy_to(rows, items.device), :width], context).float()
            parts.append(functional.pad(states, (0, 0, 0, longest - width)))
            order.append(rows)
        return torch.cat(parts)[copy_to(torch.cat(order).argsort(), items.device)]

    def embed(self, input: Tensor, context: Context) -> Tensor:
        """The stream of items [B, L, dim] into the first block; the context tells the lengths of the histories."""
        positions, lengths = torch.arange(input.shape[1], device=input.device), context.lengths
        assert lengths is not None
        from_end = (lengths - 1 - positions).clamp(min=0)
        known = input.masked_fill((positions >= lengths).unsqueeze(2), 0.0)
        stream = known * self.config.dim**0.5 + self.position(from_end)
        return dropout(stream, self.config.dropout, "items", context.dropout)

    def last(self, states: Tensor, lengths: Tensor) -> Tensor:
        """The last states [B, dim] of histories that are not empty."""
        return states[torch.arange(len(states), device=states.device), copy_to(lengths - 1, states.device)]
