"""A stack of blocks, and what stands before and after it: the one place that runs, recomputes and compiles blocks.

B batch, T length.
"""

import functools
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from kitforge.core.kernels.autograd.recomputation import KEPT_OPERATIONS, Recompute, passes
from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.nn.block import Block, BlockConfig
from kitforge.core.nn.context import Context, RowAttend
from kitforge.core.nn.norm import Norm
from kitforge.core.nn.positions import PositionEncoding
from kitforge.foundation.errors import ModelError

# A run compiles blocks for training and evaluation, with one document in a row and several, for full and last batches,
# with a window and without: at most 16 graphs. torch's default limit is 8.
_GRAPHS = 32


class Stack(nn.Module, ABC):
    """A pass is `leave(run(embed(input)))`. A block that is absent on a rank is None at its own index, so that the
    others keep their names."""

    norm: nn.Module
    recompute: Recompute = "none"  # activation checkpointing: what of a block the backward pass computes again
    # Set by `core.parallel` and called first in each pass: this rank's part of the rows, then the length of the stream.
    cut: Callable[[Tensor, Context], tuple[Tensor, Context]] | None = None
    gathers_keys: bool = False  # so it attends by documents alone
    begin: Callable[[int, Context], Context] | None = None
    length: int | None = None  # of every stream; None: of the input [B, T]
    layers: tuple[range, ...] | None = None  # of the stages of a pipeline on this rank; None: it has all
    _compiled: list[Callable[..., Tensor] | None] | None = None

    def add_blocks(self, blocks: tuple[BlockConfig, ...], kernels: Kernels, name: str = "") -> None:
        """Add the blocks and the norm; parameters are in the order of the calls. `name` is that of `Block`."""
        first = blocks[0]
        self.blocks = nn.ModuleList(Block(each, layer, kernels, name) for layer, each in enumerate(blocks))
        # A query layer has the last norm before it, a post-norm layer in it.
        has_norm = blocks[-1].query_positions is None and not blocks[-1].post_norm
        self.norm = Norm(first.norm, first.attention.dim, first.norm_eps, kernels) if has_norm else nn.Identity()
        self.dim, self._head_dim = first.attention.dim, first.attention.head_dim
        self.windows = list(dict.fromkeys(each.attention.window for each in blocks))

    @abstractmethod
    def embed(self, input: Tensor, context: Context) -> Tensor:
        """The stream [B, T, dim] into the first block, for an input such as tokens [B, T]."""

    def encode_positions(self, input: Tensor, context: Context) -> PositionEncoding:
        """The positions of an input, for the attention of all blocks. Default: the stream tells them apart."""
        return PositionEncoding()

    def run(self, stream: Tensor, encoding: PositionEncoding, context: Context, layers: range | None = None) -> Tensor:
        """The stream [B, T, dim] after those of the blocks, by default all. Raises ModelError for an absent block."""
        # With a cache each token would be a shape of its own to torch.compile.
        has_cache = not isinstance(context.attend, RowAttend)
        blocks = list(self.blocks) if has_cache or self._compiled is None else self._compiled
        for layer in range(len(blocks)) if layers is None else layers:
            block = blocks[layer]
            if block is None:
                raise ModelError("a block is not on this rank", got=f"blocks.{layer}", expected="layers of this rank")
            # A graph of the compiler holds its own selective recomputation.
            if self.recompute == "full" or (self.recompute == "selective" and blocks is not self._compiled):
                begin = functools.partial(passes, keeps=self.recompute == "selective")
                stream = _recomputed(block, begin, stream, encoding, context)
            else:
                stream = block(stream, encoding, context)
        return stream

    def leave(self, stream: Tensor, context: Context) -> Tensor:
        """The normalized output [B, T, dim] of the last block's stream."""
        hidden: Tensor = self.norm(stream)
        return hidden

    def absent_head(self) -> Tensor:
        """Of a stage without a head: an empty matrix [0, dim] of the device and dtype of the network."""
        # Its first matrix, since vectors may be in fp32 beside matrices in half precision.
        like = max((each for each in self.parameters() if each.is_floating_point()), key=Tensor.dim)
        return torch.empty(0, self.dim, dtype=like.dtype, device=like.device)

    def hidden(self, input: Tensor, context: Context | None = None) -> Tensor:
        """Normalized output [B, T, dim] of the last block for an input such as tokens [B, T]."""
        return self.stage_pass(input, Context() if context is None else context)

    def stage_pass(
        self, input: Tensor, context: Context, stream: Tensor | None = None, layers: range | None = None
    ) -> Tensor:
        """The part of `hidden` of a stage with those layers, by default all: the first embeds the input, others
        continue the stream of the one before. The last one returns the normalized output of whole rows, others the
        stream of this rank."""
        if self.cut is not None:
            input, context = self.cut(input, context)
        length = input.shape[1] if self.length is None else self.length
        if self.begin is not None:
            context = self.begin(length, context)
        stream = self.embed(input, context) if stream is None else stream
        encoding = self.encode_positions(input, context)
        if isinstance(context.attend, RowAttend):
            context.attend.prepare(stream, length, self.windows, self._head_dim)
        stream = self.run(stream, encoding, context, layers)
        if layers is not None and layers.stop < len(self.blocks):
            return stream
        hidden = self.leave(stream, context)
        return hidden if context.shard is None else context.shard.join(hidden)

    def compile_blocks(self) -> None:
        """Compile each block with torch.compile (level O2), over the same weights, as deterministic as torch's own.
        A warning says when the recompile limit is reached."""
        torch._inductor.config.deterministic = torch.are_deterministic_algorithms_enabled()
        options = torch._dynamo.config
        options.recompile_limit = max(options.recompile_limit, _GRAPHS)
        log = logging.getLogger("torch._dynamo.convert_frame")
        if not any(isinstance(each, _LimitNotice) for each in log.filters):
            log.addFilter(_LimitNotice())
            # torch warns of writes in a recomputed region; none of a block's goes to a result that is kept.
            wrap = logging.getLogger("torch._higher_order_ops.wrap")
            wrap.addFilter(lambda record: "context_fn is passed" not in record.getMessage())
        self._compiled = [block and torch.compile(self._traceable(block), dynamic=False) for block in self.blocks]

    @property
    def is_compiled(self) -> bool:
        """Whether torch compiles the blocks."""
        return self._compiled is not None

    def _traceable(self, block: nn.Module) -> Callable[..., Tensor]:
        """A block with its selective recomputation, of which the compiler knows torch's own kind."""
        names = (each.split("::") for each in KEPT_OPERATIONS)
        known = (getattr(getattr(torch.ops, namespace), name, None) for namespace, name in names)
        contexts = functools.partial(create_selective_checkpoint_contexts, [each.default for each in known if each])

        def run(stream: Tensor, encoding: PositionEncoding, context: Context) -> Tensor:
            if self.recompute == "selective":
                return _recomputed(block, contexts, stream, encoding, context)
            output: Tensor = block(stream, encoding, context)
            return output

        return run

    def __getstate__(self) -> dict[str, Any]:
        """Compiled blocks are not pickled."""
        return {**self.__dict__, "_compiled": None}


def _recomputed(block: Callable[..., Tensor], contexts: Callable[[], Any], stream: Tensor, *further: Any) -> Tensor:
    """A block's pass of which autograd saves only what the contexts keep."""
    if not torch.is_grad_enabled():
        return block(stream, *further)
    # Dropout masks are functions of their keys, so no random state is restored.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    output: Tensor = checkpoint(block, stream, *further, **options)
    return output


class _LimitNotice(logging.Filter):
    """Turns torch's log record of the limit into a warning."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        if "recompile_limit" in record.getMessage():
            warnings.warn(
                "compile_level=O2: torch has reached its limit of compiled graphs of a block, and runs every further "
                "shape of batch uncompiled. Give all batches one shape, or train with compile_level=O1.",
                stacklevel=2,
            )
        return True
