"""Tiny float64 networks of every position scheme, and documents to put through them.

B batch, T length.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder, FamilyConfig
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.moe import ExpertsConfig
from kitforge.core.nn.rotary import RopeScaling
from kitforge.models.bloom.model import BloomConfig
from kitforge.models.glm.model import GLMConfig
from kitforge.models.gpt2.model import GPT2Config
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.mixtral.model import MixtralConfig
from kitforge.models.pangu_alpha.model import PanguAlphaConfig
from kitforge.models.qwen3_moe.model import Qwen3MoEConfig

VOCAB = 31
# Longer than the shortest document of the tests and shorter than the longest, so that both sides of every rule that
# depends on length are met in one row.
TRAINED = 4

GPT2 = GPT2Config(vocab_size=VOCAB, dim=24, num_layers=2, num_heads=4, max_length=16)
LLAMA = LlamaConfig(vocab_size=VOCAB, dim=24, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=32, max_length=16)
BLOOM = BloomConfig(vocab_size=VOCAB, dim=24, num_layers=2, num_heads=3, max_length=16)
GLM = GLMConfig(vocab_size=VOCAB, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=32, max_length=16)
MIXTRAL = MixtralConfig(
    vocab_size=VOCAB,
    dim=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=20,
    max_length=16,
    experts=ExpertsConfig(num_experts=4, top_k=2),
)
QWEN3_MOE = Qwen3MoEConfig(
    vocab_size=VOCAB,
    dim=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    expert_dim=12,
    dense_layers=(1,),
    max_length=16,
    experts=ExpertsConfig(num_experts=5, top_k=2, normalize=False),
)
PANGU_ALPHA = PanguAlphaConfig(vocab_size=VOCAB, dim=24, num_layers=3, num_heads=4, max_length=16)


def _scaled(scaling: RopeScaling, max_length: int = 16) -> LlamaConfig:
    return replace(LLAMA, rope_scaling=scaling, rope_theta=100.0, max_length=max_length)


CONFIGS: dict[str, FamilyConfig] = {
    "bloom": BLOOM,
    "gpt2": GPT2,
    "llama": LLAMA,
    "linear": _scaled(RopeScaling(kind="linear", factor=3.0)),
    "dynamic": _scaled(RopeScaling(kind="dynamic", factor=3.0), TRAINED),
    "yarn": _scaled(RopeScaling(kind="yarn", factor=3.0, original_length=TRAINED)),
    "llama3": _scaled(RopeScaling(kind="llama3", factor=3.0, original_length=TRAINED)),
    "longrope": _scaled(
        RopeScaling(
            kind="longrope",
            factor=3.0,
            original_length=TRAINED,
            short_factor=(1.0, 1.1, 1.2),
            long_factor=(2.0, 2.5, 3.0),
        )
    ),
    "window": replace(LLAMA, sliding_window=3),
    "window_in_one_layer": replace(LLAMA, sliding_window=2, window_layers=(1,), qk_norm=True),
    "gemma3": replace(
        LLAMA,
        num_layers=3,
        qk_norm=True,
        mlp_kind="geglu",
        sandwich_norms=True,
        scale_embedding=True,
        sliding_window=3,
        window_layers=(0, 1),
        local_rope_theta=100.0,
        query_pre_attn_scalar=10.0,
        tie_embeddings=True,
    ),
    "no_rope_in_one_layer": replace(LLAMA, no_rope_layers=(1,)),
    "glm": GLM,
    "glm4": replace(GLM, sandwich_norms=True),
    "mixtral": MIXTRAL,
    "pangu_alpha": PANGU_ALPHA,
    "qwen3_moe": QWEN3_MOE,
}

# How many rows an expert multiplies depends on all tokens, and the order of the vendor's sums on that number.
MIXTURES = ("mixtral", "qwen3_moe")


def build(config: FamilyConfig, level: CompileLevel = "O1", dtype: torch.dtype = torch.float64) -> Decoder:
    """A network whose every parameter, biases and norms too, is off its initial value."""
    model = Decoder(config, select(level))
    init_weights(model.named_parameters(), len(model.blocks), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.to(dtype)


def documents_of(*lengths: int) -> list[Tensor]:
    """Random documents, each [its length]."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def packed(documents: Sequence[Tensor]) -> tuple[Tensor, Context]:
    """One row [1, T] of documents one after another, and its context."""
    lengths = torch.tensor([len(document) for document in documents])
    positions = torch.cat([torch.arange(int(length)) for length in lengths])
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.cat(list(documents)).unsqueeze(0), Context.packed(positions.unsqueeze(0), numbers.unsqueeze(0))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The summed next-token loss of one document's logits [T, vocab]."""
    return functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")


def gradients(model: Decoder, loss: Tensor) -> Tensor:
    """The gradients of all parameters, laid end to end."""
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([each.flatten() for each in found])


def distance(got: Tensor, wanted: Tensor) -> float:
    """The norm of the difference relative to the norm."""
    return float(((got - wanted).norm() / wanted.norm()).detach())
