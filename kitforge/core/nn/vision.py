"""The Vision Transformer (Dosovitskiy et al., 2021): patches of an image through attention in both directions.

B batch, C channels, H height, W width, N patches and the class token.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.kernels.autograd.mixed_precision import product_operands
from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.core.nn.block import DROPOUT, BlockConfig
from kitforge.core.nn.context import Context, DocumentAttend, dropout
from kitforge.core.nn.stack import Stack
from kitforge.foundation.config import check, check_counts
from kitforge.foundation.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A whole network, layer by layer."""

    image_size: int  # of a side, in pixels
    patch_size: int
    num_channels: int
    blocks: tuple[BlockConfig, ...]
    num_labels: int
    dropout: float = 0.0  # of the embeddings

    def __post_init__(self) -> None:
        check_counts("model", {"image_size": self.image_size, "patch_size": self.patch_size})
        check_counts("model", {"num_channels": self.num_channels, "num_layers": len(self.blocks)})
        fits = self.image_size % self.patch_size == 0
        check(fits, "model.patch_size", self.patch_size, f"a divisor of model.image_size={self.image_size}")
        check(0 <= self.dropout < 1, "model.embedding_dropout", self.dropout, DROPOUT)
        check(self.num_labels > 0, "labels", self.num_labels, "at least one")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionGeometry:
    """Sizes that degrees of parallelism have to divide."""

    num_heads: int
    num_kv_heads: int
    num_layers: int


class VisionFamily(Protocol):
    """The options of a family of vision transformers."""

    def vision(self) -> VisionConfig:
        """The network of these options."""


class PatchEmbedding(nn.Module):
    """The embedding of each patch: a convolution whose stride is its width, as one matrix product."""

    def __init__(self, dim: int, num_channels: int, patch_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, num_channels, patch_size, patch_size))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, patches, dim], row by row."""
        size = self.weight.shape[-1]
        batch, channels, height, width = images.shape
        grid = images.view(batch, channels, height // size, size, width // size, size)
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        # Pixels are float32; a network in float64 stays in it.
        patches = patches.to(torch.promote_types(patches.dtype, self.weight.dtype))
        patches, weight = product_operands(patches, self.weight.flatten(1))
        output: Tensor = functional.linear(patches, weight)
        return output + self.bias


class VisionTransformer(Stack):
    """Images [B, C, H, W] -> logits [B, labels] of the class token."""

    def __init__(self, config: VisionFamily, kernels: Kernels = REFERENCE) -> None:
        super().__init__()
        shape = config.vision()
        block = shape.blocks[0]
        dim = block.attention.dim
        num_patches = (shape.image_size // shape.patch_size) ** 2
        self.config = config
        self.kernels = kernels
        self.geometry = VisionGeometry(
            num_heads=block.attention.num_heads, num_kv_heads=block.attention.num_kv_heads, num_layers=len(shape.blocks)
        )
        self.input_shape = shape.num_channels, shape.image_size, shape.image_size
        self.patches = PatchEmbedding(dim, shape.num_channels, shape.patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, dim))
        self.position = nn.Parameter(torch.empty(1, num_patches + 1, dim))
        self.add_blocks(shape.blocks, kernels)
        self.classifier = nn.Linear(dim, shape.num_labels, device=self.position.device)
        self.length = num_patches + 1
        self._rate = shape.dropout

    def stage_pass(
        self, input: Tensor, context: Context, stream: Tensor | None = None, layers: range | None = None
    ) -> Tensor:
        """See `Stack`, for images; the class token comes first. Of a context only the dropout is read. Raises
        ModelError for images of another size."""
        if tuple(input.shape[1:]) != self.input_shape:
            raise ModelError("images of another size", got=list(input.shape[1:]), expected=list(self.input_shape))
        own = Context(attend=DocumentAttend(), dropout=context.dropout)
        return super().stage_pass(input, own, stream, layers)

    def embed(self, input: Tensor, context: Context) -> Tensor:
        """The stream [B, N, dim] of images into the first block."""
        patches = self.patches(input)
        stream = torch.cat([self.class_token.to(patches.dtype).expand(patches.shape[0], -1, -1), patches], dim=1)
        return dropout(stream + self.position, self._rate, "embedding", context.dropout)

    def logits(self, images: Tensor, context: Context | None = None) -> Tensor:
        """Logits [B, labels], in fp32 at least."""
        scores: Tensor = self.classifier(self.hidden(images, context)[:, 0])
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, labels]."""
        return self.logits(images)
