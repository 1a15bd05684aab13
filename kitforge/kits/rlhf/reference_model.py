"""Networks that stay as they are while a stage trains, and that it cannot go on without."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

from torch import nn

from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.world import ALONE
from kitforge.foundation.dtype import DTYPES, Precision
from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.model_copy import fingerprint, to_half


@final
class ReferenceModel:
    """`reference`: what the policy is compared with; None for losses that need none. `bases`: what adapters are trained
    beside; none where the weights themselves are trained. `judges`: reward models. `given`: networks of the caller's,
    which stay as they are."""

    def __init__(
        self,
        reference: nn.Module | None = None,
        bases: Sequence[nn.Module] = (),
        known: str | None = None,
        *,
        judges: Sequence[nn.Module] = (),
        given: Sequence[nn.Module] = (),
    ) -> None:
        """`known`: the fingerprint of the reference, where that was read piece by piece."""
        self.model = reference
        self._bases = tuple(bases)
        self._fingerprint = known
        self._judges = tuple(judges)
        self._given = tuple(given)

    def reshard(self) -> None:
        """After a forward pass of a reference that is cut: its pieces are let go again."""
        if self.model is not None:
            parallel_model_of(self.model, ALONE).reshard()

    def hold_in(self, precision: Precision, model: nn.Module) -> None:
        """Hold matrices in the run's precision, once `model` has been built: of networks that are not trained, and of
        its own those that are not."""
        if precision == "fp32":
            return
        # Fingerprints are those of the weights as they were found, whatever a run's precision is.
        assert self.state
        networks = [model, *self._bases, *self._judges, *([] if self.model is None else [self.model])]
        trained = nn.ParameterList(each for each in model.parameters() if each.requires_grad)
        to_half(networks, [trained, *self._given], DTYPES[precision])

    @cached_property
    def state(self) -> dict[str, Any]:
        """What they are, ready for JSON."""
        return {
            "reference": self._fingerprint or (None if self.model is None else fingerprint(self.model)),
            "base": fingerprint(nn.ModuleList(self._bases)) if self._bases else None,
        }

    def check_same(self, state: dict[str, Any], allowed: bool) -> None:
        """`check_same` of its own state."""
        check_frozen_weights(self.state, state, allowed)


def check_frozen_weights(current: dict[str, Any], state: dict[str, Any], allowed: bool) -> None:
    """Raise ConfigError where the base found is another than the one of that state, or the reference is and that is not
    allowed. Another base never is: what is read back would be written into the one that others hold as well."""
    if (base := state.get("base")) is not None and base != current["base"]:
        raise ConfigError(
            "adapters cannot go on beside other weights than those they were trained beside",
            got=_short_digest(current["base"]),
            expected=_short_digest(base),
            fix="start from the same model (checkpoint=RUN or model=), or begin a new run from this one's weights",
        )
    if (reference := state.get("reference")) != current["reference"] and not allowed:
        raise ConfigError(
            "the reference is not the one that the run began with",
            got=_short_digest(current["reference"]),
            expected=_short_digest(reference),
            fix="start from the same model, or add trainer.allow_config_changes=true to go on all the same",
        )


def _short_digest(fingerprint: str | None) -> str:
    return "none" if fingerprint is None else f"weights {fingerprint[:12]}"
