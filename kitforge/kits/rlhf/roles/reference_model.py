"""The frozen models of a task: the reference model and the base model of adapters."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import nn

from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.world import ALONE
from kitforge.foundation.dtype import DTYPES, Precision
from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.roles.model_copy import fingerprint, to_half


class ReferenceModel:
    """The reference model (None for losses without one), the base models of LoRA adapters (`bases`) and the reward
    models (`judges`). `given`: models of the caller, which keep their precision."""

    def __init__(
        self,
        reference: nn.Module | None = None,
        bases: Sequence[nn.Module] = (),
        known: str | None = None,
        *,
        judges: Sequence[nn.Module] = (),
        given: Sequence[nn.Module] = (),
    ) -> None:
        """`known`: the fingerprint of a reference that was loaded in shards."""
        self.model = reference
        self._bases = tuple(bases)
        self._fingerprint = known
        self._judges = tuple(judges)
        self._given = tuple(given)

    def reshard(self) -> None:
        """Free the gathered weights of a sharded reference after a forward pass."""
        if self.model is not None:
            parallel_model_of(self.model, ALONE).reshard()

    def hold_in(self, precision: Precision, model: nn.Module) -> None:
        """Cast frozen matrices to the run's precision, those of `model` included."""
        if precision == "fp32":
            return
        # Fingerprints are taken before the cast, so that they do not depend on the precision.
        assert self.state
        networks = [model, *self._bases, *self._judges, *([] if self.model is None else [self.model])]
        trained = nn.ParameterList(each for each in model.parameters() if each.requires_grad)
        to_half(networks, [trained, *self._given], DTYPES[precision])

    @cached_property
    def state(self) -> dict[str, Any]:
        """Fingerprints of reference and base model."""
        return {
            "reference": self._fingerprint or (None if self.model is None else fingerprint(self.model)),
            "base": fingerprint(nn.ModuleList(self._bases)) if self._bases else None,
        }


def check_frozen_weights(current: dict[str, Any], state: dict[str, Any], allowed: bool) -> None:
    """Raise ConfigError if the base model differs from that of `state`, or the reference does and that is not allowed.
    Another base model is never allowed, as adapters fit their own base only."""
    if (base := state.get("base")) is not None and base != current["base"]:
        raise ConfigError(
            "the base weights changed since these adapters were trained",
            got=_short_digest(current["base"]),
            expected=_short_digest(base),
            fix="start from the same model (checkpoint=RUN or model=), or begin a new run from this one's weights",
        )
    if (reference := state.get("reference")) != current["reference"] and not allowed:
        raise ConfigError(
            "the reference model changed since the run began",
            got=_short_digest(current["reference"]),
            expected=_short_digest(reference),
            fix="start from the same model, or add trainer.allow_config_changes=true to accept this one",
        )


def _short_digest(fingerprint: str | None) -> str:
    return "none" if fingerprint is None else f"weights {fingerprint[:12]}"
