"""The families, in one plain dict. A new family is a folder beside the others and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kitforge.core.nn.decoder import FamilyConfig
from kitforge.core.nn.embedding_spec import RecommenderConfig
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import ConfigError, ModelError, nearest
from kitforge.models.dcn.model import DCNV2Config
from kitforge.models.deepfm.model import DeepFMConfig
from kitforge.models.din.model import DINConfig
from kitforge.models.dlrm.model import DLRMConfig
from kitforge.models.glm import convert as glm
from kitforge.models.gpt2 import convert as gpt2
from kitforge.models.llama import convert as llama
from kitforge.models.sasrec.model import SASRecConfig
from kitforge.models.two_tower.model import TwoTowerConfig
from kitforge.models.weight_mapping import Family
from kitforge.models.wide_deep.model import WideDeepConfig

FAMILIES: dict[str, Family] = {"glm": glm.FAMILY, "gpt2": gpt2.FAMILY, "llama": llama.FAMILY}

RECOMMENDERS: dict[str, type[Any]] = {
    config.family: config
    for config in (DCNV2Config, DeepFMConfig, DINConfig, DLRMConfig, SASRecConfig, TwoTowerConfig, WideDeepConfig)
}


def recommender_of(values: Mapping[str, Any]) -> RecommenderConfig:
    """A recommender family's options from a plain dict with the key `family`."""
    options = dict(values)
    name = str(options.pop("family", None))
    if name not in RECOMMENDERS:
        fix = "use it with task=text_generation" if name in FAMILIES else nearest(name, RECOMMENDERS)
        raise ConfigError("unknown recommender family", got=name, fix=fix)
    config: RecommenderConfig = from_dict(RECOMMENDERS[name], options, "model")
    return config


def config_of(values: Mapping[str, Any]) -> FamilyConfig:
    """A family's options from a plain dict with the key `family`."""
    options = dict(values)
    name = str(options.pop("family", None))
    if name not in FAMILIES:
        fix = "add task=recommendation" if name in RECOMMENDERS else nearest(name, FAMILIES)
        raise ConfigError("unknown model family", got=name, fix=fix)
    config: FamilyConfig = from_dict(FAMILIES[name].config, options, "model")
    return config


def family_of_type(model_type: str) -> Family:
    """The family that reads folders whose config.json says `model_type`."""
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    known = sorted(kind for family in FAMILIES.values() for kind in family.model_types)
    raise ModelError("an architecture that Kitforge does not have", got=model_type, expected=", ".join(known))
