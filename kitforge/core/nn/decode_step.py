"""A step of a decoder over a key-value cache in one fused kernel, where its kernels have one and the model is not
sharded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES
from kitforge.core.kernels.cpu_engine.threads import single_thread
from kitforge.core.kernels.fused_decode_step.reference import (
    Angles,
    BlockWeights,
    DecoderWeights,
    DecodeStepKernel,
    Locations,
    Update,
)
from kitforge.core.kernels.quantized_linear.reference import GROUP, Blocks
from kitforge.core.kernels.triton.accepts import PAGED_HEAD
from kitforge.core.nn.attention import Attention
from kitforge.core.nn.block import Block
from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.mlp import MLP
from kitforge.core.nn.norm import Norm
from kitforge.core.nn.positions import PositionEncoding

# What a step computes: the modules of a block, and those around the blocks.
_PARTS: dict[str, type[nn.Module]] = {
    **dict.fromkeys(("attention.query", "attention.key", "attention.value", "attention.out"), Linear),
    **dict.fromkeys(("mlp.gate", "mlp.up", "mlp.down"), Linear),
    **dict.fromkeys(("attention.query_norm", "attention.key_norm", "attention_norm", "attention_out_norm"), Norm),
    **dict.fromkeys(("mlp_norm", "mlp_out_norm"), Norm),
}
_BLOCK = {"": Block, ".attention": Attention, ".mlp": MLP} | {f".{name}": kind for name, kind in _PARTS.items()}
_STACK = {"": Decoder, "embedding": nn.Embedding, "position": nn.Embedding, "blocks": nn.ModuleList}
_STACK |= {"embedding_norm": Norm, "norm": Norm, "stored_head": Linear}
# In place of a weight that a module has not.
_NONE = torch.empty(0)
_version = attrgetter("_version")


class FusedDecodeStep:
    """Runs `model` over the key-value cache. `slabs` gives the keys and values [slots, kv_heads, head_dim] of a layer,
    for an example key [1, kv_heads, 1, head_dim]. Adapters are the updates of linear layers by their names."""

    def __init__(
        self,
        model: nn.Module,
        slabs: Callable[[int, Tensor], tuple[Tensor, Tensor]],
        adapters: Sequence[Mapping[str, Update]] = (),
    ) -> None:
        self._model = model
        self._slabs = slabs
        self._adapters = adapters
        self._table: Angles | None = None  # of positions from 0 on
        self.forget()

    def forget(self) -> None:
        """Read the network anew: it has changed."""
        modules = list(self._model.modules())
        self._attributes = [vars(each) for each in modules]
        self._owners = [(each._parameters, name) for each in modules for name in each._parameters]
        self._num_hooks, self._has_hooks = -1, False
        self._marks: tuple[list[int], list[int]] = [], []
        self._dtype: torch.dtype | None = None
        self.kernel: DecodeStepKernel | None = None  # of the last step, with what it reads beside the weights
        self._rereads = False

    def reread(self) -> None:
        """At the next step, read weights anew: they may have changed in place, with or without a trace."""
        self._rereads = True

    def __call__(self, tokens: Tensor, context: Context, locations: Locations) -> tuple[Tensor, Tensor] | None:
        """Normalized output [tokens, dim] and logits [rows, vocab] of tokens [1, tokens] at these locations. None where
        the modules must run one by one."""
        if torch.is_grad_enabled():
            return None
        if cast(Any, _has_any_global_hook)() or self._is_wrapped():
            return None
        marks, kind = self._weight_marks(), tokens.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if marks != self._marks or dtype is not self._dtype:
            self.kernel = None  # its memory is free before the next one takes as much
            self._marks, self._dtype, self.kernel = marks, dtype, self._new_blocks(dtype)
        if self.kernel is None:
            return None
        model = cast(Decoder, self._model)
        with single_thread():
            stream, angles = model.embed(tokens, context), self._angles(tokens, context)
        result = self.kernel(stream[0], angles, locations, rereads=self._rereads)
        self._rereads = False
        return result

    def _angles(self, tokens: Tensor, context: Context) -> Angles | None:
        """Cosines and sines [rotations, tokens, pairs] of the positions of tokens [1, tokens]."""
        model, positions = cast(Decoder, self._model), context.positions
        if positions is None or not model.has_fixed_angles:
            return _stacked(model.encode_positions(tokens, context))
        # Computing them takes a dozen operations, looking them up two. A GPU would wait for a look at positions.
        length = int(positions.max()) + 1 if positions.is_cpu else model.geometry.max_length
        if self._table is None or self._table[0].shape[1] < length:
            known = torch.arange(
                max(length, min(2 * length, model.geometry.max_length)), device=positions.device
            ).unsqueeze(0)
            self._table = _stacked(model.encode_positions(known, Context(positions=known)))
        cos, sin = cast(Angles, self._table)
        return cos.index_select(1, positions[0]), sin.index_select(1, positions[0])

    def _is_wrapped(self) -> bool:
        """Whether calls of a module are changed: by adapters, parallelism or hooks."""
        # As all that runs over hundreds of modules in each step: without a call for each, and hooks only where torch,
        # which numbers all of them, has added one.
        if self._has_hooks or self._num_hooks != RemovableHandle.next_id:
            self._num_hooks = RemovableHandle.next_id
            self._has_hooks = any(each["_forward_hooks"] or each["_forward_pre_hooks"] for each in self._attributes)
        return self._has_hooks or any("forward" in each for each in self._attributes)

    def _weight_marks(self) -> tuple[list[int], list[int]]:
        """Addresses and versions. Weights are read by address: one that was moved or replaced has another. Copies of
        them are of one version; an inference tensor has none, and `Tensor.data` changes none."""
        weights = [_NONE if (weight := owned[name]) is None else weight for owned, name in self._owners]
        try:
            versions = list(map(_version, weights))
        except RuntimeError:
            versions = [0 if each.is_inference() else each._version for each in weights]
        return list(map(Tensor.data_ptr, weights)), versions

    def _new_blocks(self, autocast: torch.dtype | None) -> DecodeStepKernel | None:
        model = self._model
        if not is_fusable(model):
            return None
        decoder = cast(Decoder, model)
        own = decoder.head_weight.dtype
        # Without native products in bfloat16, the modules' products take weights in fp32 under autocast. Elsewhere
        # copies of the weights would not fit.
        has_copies = autocast is torch.bfloat16 and NATIVE_DTYPES[autocast] and decoder.head_weight.is_cpu
        if autocast not in (None, own) and not has_copies:
            return None
        head_dim, blocks = decoder.geometry.head_dim, cast(list[Block], list(decoder.blocks))
        shape = 1, decoder.geometry.num_kv_heads, 1, head_dim
        like = decoder.head_weight.new_empty(shape, dtype=own if autocast is None else autocast)
        slabs = [self._slabs(layer, like) for layer in range(len(blocks))]
        if any(each.dtype is not like.dtype for pair in slabs for each in pair):
            return None
        assert decoder.kernels.fused_decode_step is not None
        updates = tuple(
            tuple(_by_part(each, layer, like.dtype) for layer in range(len(blocks))) for each in self._adapters
        )
        return decoder.kernels.fused_decode_step(replace(stack_of(decoder), adapters=updates), slabs)


def _by_part(updates: Mapping[str, Update], layer: int, dtype: torch.dtype) -> dict[str, Update]:
    """The updates of a layer by the last names of its parts, in the dtype of products."""
    names = {name.rpartition(".")[2]: f"blocks.{layer}.{name}" for name in _PARTS}
    found = {part: updates[name] for part, name in names.items() if name in updates}
    return {part: Update(down.to(dtype), up.to(dtype), each) for part, (down, up, each) in found.items()}


def _stacked(positions: PositionEncoding) -> Angles | None:
    """The cosines and the sines of all rotations; None where there are none."""
    if not positions.rotary:
        return None
    cos, sin = zip(*positions.rotary, strict=True)
    return torch.cat(cos), torch.cat(sin)


def is_fusable(model: nn.Module) -> bool:
    """Whether the kernel can run the model: a plain decoder, in fp32 or bfloat16 on the kernel's device, with blocks of
    one shape; but on a CPU not quantized, and with heads of at most `PAGED_HEAD` features."""
    if type(model) is not Decoder or model.kernels.fused_decode_step is None or not _is_plain(model):
        return False
    blocks = cast(list[Block], list(model.blocks))
    return len(set(map(_shape, blocks))) == 1 and blocks[0].mlp.kind in ("gelu_tanh", "swiglu", "geglu")


def stack_of(model: Decoder) -> DecoderWeights:
    """The weights of a decoder with blocks of equal shapes."""
    blocks = cast(list[Block], list(model.blocks))
    first = blocks[0].attention
    norm = cast(Norm, model.norm)
    return DecoderWeights(
        layers=tuple(map(_layer, blocks)),
        scales=tuple(block.attention.scale for block in blocks),
        windows=tuple(block.attention.spec.window for block in blocks),
        rotations=tuple(block.attention.config.rotary for block in blocks),
        gate="gelu" if blocks[0].mlp.kind == "geglu" else "silu",
        norm=norm.weight,
        has_exact_norms=norm.weight.dtype is not model.head_weight.dtype,
        norm_bias=norm.bias,
        head=cast(Any, model.head_weight if model.stored_head is None else _weight(model.stored_head)),
        head_dim=first.config.head_dim,
        norm_eps=norm.eps,
        qk_norm_eps=0.0 if first.query_norm is None else first.query_norm.eps,
        interleaved_rotary=first.config.interleaved_rotary,
        slopes=model.slopes(model.head_weight.device),
        bits=getattr(model.kernels.linear, "bits", None),
    )


def _layer(block: Block) -> BlockWeights:
    parts = {name.rpartition(".")[2]: attrgetter(name)(block) for name in _PARTS}
    found: dict[str, Any] = {}
    for name in BlockWeights.__slots__:
        owner = name.removesuffix("_bias")
        part = parts[owner]
        found[name] = _weight(part) if name == owner else getattr(part, "bias", None)
    return BlockWeights(**found)


def _weight(part: nn.Module | None) -> Tensor | Blocks | None:
    scales = part.scales if isinstance(part, Linear) else None
    weight = cast(Tensor, getattr(part, "weight", None))
    return weight if scales is None else Blocks(weight, scales)


def _shape(block: Block) -> tuple[object, ...]:
    """The shapes and options that all blocks of a fused decoder share."""
    shapes = [None if each is None else each.shape for each in _layer(block).tensors()]
    norms = [each.eps for each in block.modules() if isinstance(each, Norm)]
    return (*shapes, *norms, block.attention.config.head_dim, block.attention.config.interleaved_rotary)


def _is_plain(model: Decoder) -> bool:
    layers = range(len(model.blocks))
    known = _STACK | {f"blocks.{layer}{name}": kind for layer in layers for name, kind in _BLOCK.items()}
    # A module that a step does not know would be skipped.
    if None in set(model.blocks) or any(type(each) is not known.get(name) for name, each in model.named_modules()):
        return False
    head, linears = model.head_weight, [each for each in model.modules() if isinstance(each, Linear)]
    quantized = [Blocks(each.weight, each.scales) for each in linears if each.scales is not None]
    if any(each.is_float8 for each in linears) or not all(map(_is_steppable, quantized)):
        return False
    if getattr(model.kernels.fused_decode_step, "device", "cpu") != head.device.type:
        return False
    is_quantized = bool(quantized) or hasattr(model.kernels.linear, "bits")
    if not head.is_cpu and (is_quantized or model.geometry.head_dim > PAGED_HEAD):
        return False
    dtype, others = head.dtype, {id(each) for blocks in quantized for each in blocks}
    norms = [each for norm in model.modules() if isinstance(norm, Norm) for each in norm.parameters()]
    if {each.dtype for each in norms} == {torch.float32}:
        others |= set(map(id, norms))
    return dtype in (torch.float32, torch.bfloat16) and all(
        (each.dtype is dtype or id(each) in others) and each.device == head.device and each.is_contiguous()
        for each in model.parameters()
    )


def _is_steppable(blocks: Blocks) -> bool:
    features, groups = blocks.shape[1], blocks.scales.shape[1]
    is_whole = features % GROUP == 0 and groups in (1, features // GROUP)
    return is_whole and blocks.scales.dtype in (torch.float32, torch.float16)
