"""The model families, in one dict. A new family is a folder beside the others and a line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from torch import nn

from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.core.nn.decoder import Decoder, FamilyConfig
from kitforge.core.nn.embedding_spec import RecommenderConfig, SampleShape
from kitforge.core.nn.encoder import Encoder
from kitforge.core.nn.encoder_decoder import EncoderDecoder
from kitforge.core.nn.vision import VisionTransformer
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import ConfigError, ModelError, nearest
from kitforge.models.bert import convert as bert
from kitforge.models.bert.model import BertConfig
from kitforge.models.bloom import convert as bloom
from kitforge.models.bloom.model import BloomConfig
from kitforge.models.dcn.model import DCNV2, DCNV2Config
from kitforge.models.deepfm.model import DeepFM, DeepFMConfig
from kitforge.models.din.model import DIN, DINConfig
from kitforge.models.dlrm.model import DLRM, DLRMConfig
from kitforge.models.glm import convert as glm
from kitforge.models.glm.model import GLMConfig
from kitforge.models.gpt2 import convert as gpt2
from kitforge.models.gpt2.model import GPT2Config
from kitforge.models.llama import convert as llama
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.mixtral import convert as mixtral
from kitforge.models.mixtral.model import MixtralConfig
from kitforge.models.pangu_alpha import convert as pangu_alpha
from kitforge.models.pangu_alpha.model import PanguAlphaConfig
from kitforge.models.qwen3_moe import convert as qwen3_moe
from kitforge.models.qwen3_moe.model import Qwen3MoEConfig
from kitforge.models.sasrec.model import SASRec, SASRecConfig
from kitforge.models.t5 import convert as t5
from kitforge.models.t5.model import T5Config
from kitforge.models.two_tower.model import TwoTower, TwoTowerConfig
from kitforge.models.vit import convert as vit
from kitforge.models.vit.model import ViTConfig
from kitforge.models.weight_mapping import Converter
from kitforge.models.wide_deep.model import WideDeep, WideDeepConfig

Kind = Literal["language model", "encoder", "encoder-decoder", "vision", "recommender"]
# The kinds whose hidden states of a text are pooled or labelled.
TEXT_KINDS: tuple[Kind, ...] = ("language model", "encoder")
# The task that a user adds to train a family of each kind.
_TASK_HINTS: dict[Kind, str] = {
    "language model": "use it with task=text_generation",
    "encoder": "use it with task=masked_lm, embedding or question_answering",
    "encoder-decoder": "use it with task=translation or task=summarization",
    "vision": "use it with task=image_classification",
    "recommender": "add task=recommendation",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture: its options, its network, and its conversion to and from Hugging Face folders."""

    name: str
    config: type[Any]  # the frozen dataclass of its options
    build: Callable[..., nn.Module]  # language model: (config, kernels); recommender: (config, SampleShape, kernels)
    convert: Converter | None  # None: has no Hugging Face format
    kind: Kind


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(name="bert", config=BertConfig, build=Encoder, convert=bert.CONVERTER, kind="encoder"),
        Family(name="bloom", config=BloomConfig, build=Decoder, convert=bloom.CONVERTER, kind="language model"),
        Family(name="dcn_v2", config=DCNV2Config, build=DCNV2, convert=None, kind="recommender"),
        Family(name="deepfm", config=DeepFMConfig, build=DeepFM, convert=None, kind="recommender"),
        Family(name="din", config=DINConfig, build=DIN, convert=None, kind="recommender"),
        Family(name="dlrm", config=DLRMConfig, build=DLRM, convert=None, kind="recommender"),
        Family(name="glm", config=GLMConfig, build=Decoder, convert=glm.CONVERTER, kind="language model"),
        Family(name="gpt2", config=GPT2Config, build=Decoder, convert=gpt2.CONVERTER, kind="language model"),
        Family(name="llama", config=LlamaConfig, build=Decoder, convert=llama.CONVERTER, kind="language model"),
        Family(name="mixtral", config=MixtralConfig, build=Decoder, convert=mixtral.CONVERTER, kind="language model"),
        Family(
            name="pangu_alpha",
            config=PanguAlphaConfig,
            build=Decoder,
            convert=pangu_alpha.CONVERTER,
            kind="language model",
        ),
        Family(
            name="qwen3_moe", config=Qwen3MoEConfig, build=Decoder, convert=qwen3_moe.CONVERTER, kind="language model"
        ),
        Family(name="sasrec", config=SASRecConfig, build=SASRec, convert=None, kind="recommender"),
        Family(name="t5", config=T5Config, build=EncoderDecoder, convert=t5.CONVERTER, kind="encoder-decoder"),
        Family(name="two_tower", config=TwoTowerConfig, build=TwoTower, convert=None, kind="recommender"),
        Family(name="vit", config=ViTConfig, build=VisionTransformer, convert=vit.CONVERTER, kind="vision"),
        Family(name="wide_deep", config=WideDeepConfig, build=WideDeep, convert=None, kind="recommender"),
    )
}


def families_of(*kinds: Kind) -> dict[str, Family]:
    """The families of these kinds, by name."""
    return {name: family for name, family in FAMILIES.items() if family.kind in kinds}


def config_of(values: Mapping[str, Any], *kinds: Kind) -> FamilyConfig:
    """The options of a network that has a Hugging Face format from a plain dict with the key `family`. Raises
    ConfigError, also for a family that is of none of these kinds."""
    family = FAMILIES.get(str(values.get("family")))
    own: Kind = "language model" if family is None or family.convert is None else family.kind
    config: FamilyConfig = _config(values, *(kinds or (own,)))
    return config


def recommender_of(values: Mapping[str, Any]) -> RecommenderConfig:
    """The options of a recommender from a plain dict with the key `family`. Raises ConfigError."""
    config: RecommenderConfig = _config(values, "recommender")
    return config


def _config(values: Mapping[str, Any], *kinds: Kind) -> Any:
    options = dict(values)
    name = str(options.pop("family", None))
    family = FAMILIES.get(name)
    if family is None or family.kind not in kinds:
        fix = nearest(name, families_of(*kinds)) if family is None else _TASK_HINTS[family.kind]
        message = f"unknown {kinds[0]} family" if family is None else "this task trains another kind of network"
        expected = None if family is None else f"of kind {' or '.join(kinds)}"
        raise ConfigError(message, got=name, expected=expected, fix=fix)
    return from_dict(family.config, options, "model")


def build_recommender(config: RecommenderConfig, shape: SampleShape, kernels: Kernels = REFERENCE) -> nn.Module:
    """The network of a recommender over samples of that shape, its embedding tables left out. Most are called as
    `network(dense [B, d], vectors, dropout) -> logits [B]`."""
    return FAMILIES[config.family].build(config, shape, kernels)


def config_of_network(network: nn.Module) -> FamilyConfig | None:
    """The options of a network of the catalog that has a Hugging Face format; None for any other network."""
    found: Any = network.config if isinstance(network, (Decoder, Encoder, EncoderDecoder, VisionTransformer)) else None
    return cast(FamilyConfig | None, found)


def without_head(config: FamilyConfig) -> FamilyConfig:
    """The same options without a language-model head, for models that read hidden states only."""
    # Every family's options are a dataclass with one of these fields.
    change = {"lm_head": False} if hasattr(config, "lm_head") else {"tie_embeddings": True}
    found: FamilyConfig = replace(cast(Any, config), **change)
    return found


def initial_deviations(config: FamilyConfig) -> Mapping[str, float]:
    """The standard deviations of a family's own for `init_weights`; empty for one that takes the common ones."""
    found: Mapping[str, float] = getattr(config, "deviations", {})
    return found


def exportable_config(model: nn.Module) -> FamilyConfig:
    """The options of a network that has a Hugging Face format. Raises ModelError for any other."""
    config = config_of_network(model)
    if config is None:
        raise ModelError(
            "only the families can be exported",
            got=type(model).__name__,
            expected=", ".join(name for name, each in FAMILIES.items() if each.convert is not None),
        )
    return config


def converter_of(config: FamilyConfig) -> Converter:
    """The conversion of the family that these options belong to."""
    converter = FAMILIES[config.family].convert
    assert converter is not None
    return converter


def exact_names(config: FamilyConfig) -> set[str]:
    """The weights that are stored without an offset, which no half-precision number holds together with it."""
    converter = converter_of(config)
    try:
        kind = converter.write_config(config)["model_type"]
    except ModelError:
        return set()  # of no architecture of Hugging Face
    return {each.ours for each in converter.tensor_mappings(config, kind) if each.offset}


def converter_of_type(model_type: str) -> Converter:
    """The conversion for folders whose config.json has that `model_type`. Raises ModelError."""
    converters = [family.convert for family in FAMILIES.values() if family.convert is not None]
    for converter in converters:
        if model_type in converter.model_types:
            return converter
    known = sorted(each for converter in converters for each in converter.model_types)
    raise ModelError("Kitforge does not have this architecture", got=model_type, expected=", ".join(known))
