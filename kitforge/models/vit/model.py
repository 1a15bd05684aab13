"""ViT: image patches through a transformer encoder, labelled by its class token (Dosovitskiy et al., 2021)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from kitforge.core.nn.vision import VisionConfig
from kitforge.foundation.config import check
from kitforge.models.transformer_config import TransformerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig(TransformerConfig):
    """Sizes and options of a ViT, its labels, and how it wants its images."""

    family: ClassVar[str] = "vit"
    labels: tuple[str | int | bool, ...] = ("LABEL_0", "LABEL_1")  # in the order of the logits
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] = (
        "single_label_classification"
    )
    image_size: int = 224  # pixels of a side
    patch_size: int = 16
    num_channels: int = 3
    mlp_dim: int | None = None  # None: 4 * dim
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    norm_eps: float = 1e-12
    qkv_bias: bool = True
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    # What pixels from 0 to 1 are normalized by, for each channel.
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_resize: tuple[int, ...] = ()  # height and width, or the shorter side, before a crop to image_size; (): to it
    image_resample: Literal["none", "nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] = "bilinear"

    def __post_init__(self) -> None:
        TransformerConfig.__post_init__(self)
        resize = self.image_resize
        check(len(resize) <= 2 and all(each > 0 for each in resize), "model.image_resize", resize, "one or two numbers")
        for name in ("image_mean", "image_std"):
            value, expected = getattr(self, name), f"{self.num_channels} numbers, one for each channel"
            fits = len(value) == self.num_channels and (name == "image_mean" or all(each > 0 for each in value))
            check(fits, f"model.{name}", value, expected)

    def vision(self) -> VisionConfig:
        """The network of these options."""
        dropout = self.attention_dropout, self.residual_dropout
        block = self.gpt_block(self.activation, dropout, self.mlp_dim, qkv_bias=self.qkv_bias)
        return VisionConfig(
            image_size=self.image_size,
            patch_size=self.patch_size,
            num_channels=self.num_channels,
            blocks=(block,) * self.num_layers,
            num_labels=len(self.labels),
            dropout=self.embedding_dropout,
        )
