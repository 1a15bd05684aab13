"""What the networks of a stage must agree on, and what a stage does to the one that it trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, final

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import to_dict
from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.config import StageOptions
from kitforge.kits.rlhf.model_loading import find_tokenizer_or_none
from kitforge.kits.rlhf.reward_model import ValueHeadModel
from kitforge.kits.rlhf.rewards import reward_members
from kitforge.models.catalog import config_of_network
from kitforge.trainer.callbacks.callback import Callback, Event
from kitforge.trainer.callbacks.callback import RunContext as Running
from kitforge.trainer.run_folder import Run

# Roles that read the tokens that the policy writes.
TOKEN_ROLES = ("reward", "reference")


def check_role_tokenizers(options: StageOptions, roles: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a reference, handed over or named by the options, that would read the policy's tokens as
    others than they are, and for a role whose network knows fewer tokens than it is to read."""
    named = {
        name: getattr(options, name) for name in TOKEN_ROLES if isinstance(getattr(options, name, None), (str, list))
    }
    roles = {**named, **roles}
    for name, given in ((each, one) for each in TOKEN_ROLES for one in _members(roles.get(each))):
        own = _tokenizer_of(given)
        # A reward model that has a tokenizer of its own reads text.
        if own is not None and own.fingerprint != tokenizer.fingerprint and name == "reference":
            raise ConfigError(
                f"the role {name} reads other tokens than the policy writes",
                got=_tokenizer_text(own),
                expected=_tokenizer_text(tokenizer),
                fix="train it with the policy's tokenizer, as when it starts from the policy's run",
            )
        known, wanted = _vocab_size(given.model if isinstance(given, Run) else given), own or tokenizer
        if known is not None and known < wanted.vocab_size:
            raise ConfigError(
                f"the role {name} does not know all tokens that it is to read",
                got=f"a vocabulary of {known}",
                expected=f"at least the tokenizer's {wanted.vocab_size}",
            )


def _members(given: Any) -> list[Any]:
    """What is in a role: one, or several, some of them behind a weight."""
    several = list(reward_members(given).values()) or [given]
    return [each[-1] if isinstance(each, (tuple, list)) and each else each for each in several]


def _tokenizer_of(given: Any) -> Tokenizer | None:
    """That of a run; None for what is in memory or has none beside it."""
    if isinstance(given, Run):
        return cast(Tokenizer, given.processor)
    folder = Path(given).expanduser() if isinstance(given, (str, Path)) else None
    return None if folder is None or not folder.is_dir() else find_tokenizer_or_none(folder)


def _tokenizer_text(tokenizer: Tokenizer) -> str:
    return f"{type(tokenizer).__name__} of {tokenizer.vocab_size} tokens ({tokenizer.fingerprint[:8]})"


def _vocab_size(given: Any) -> int | None:
    network = given.backbone if isinstance(given, ValueHeadModel) else given
    return network.geometry.vocab_size if isinstance(network, CausalLM) else None


@final
class DisableDropout(Callback):
    """Takes dropout out of what is trained, and says so: ratios and rewards compare a policy with itself. Decoders have
    it only where they are told its noise, which none of these stages does."""

    def __init__(self) -> None:
        self._rates: set[float] = set()

    def on_event(self, event: Event, run: Running) -> None:
        """At the start; said after the first step, when everybody hears it."""
        if event.kind == "start":
            self._rates = _dropout_rates(run.model)
            for layer in _dropout_layers(run.model):
                layer.p = 0.0
        elif event.kind == "step" and self._rates:
            rates, self._rates = ", ".join(map(str, sorted(self._rates))), set()
            run.log_event("dropout", f"the network's dropout of {rates} is off in this stage")


def _dropout_layers(model: nn.Module) -> list[_DropoutNd]:
    return [each for each in model.modules() if isinstance(each, _DropoutNd)]


def _dropout_rates(model: nn.Module) -> set[float]:
    configs = [config for each in model.modules() if (config := config_of_network(each)) is not None]
    asked = {value for config in configs for name, value in to_dict(config).items() if name.endswith("dropout")}
    return {rate for rate in (*asked, *(layer.p for layer in _dropout_layers(model))) if rate}
