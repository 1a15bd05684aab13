"""Checks that policy, reference and reward model share a tokenizer and vocabulary; disables dropout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch.nn.modules.dropout import _DropoutNd

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import to_dict
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.files import user_path
from kitforge.kits.rlhf.config import StageOptions
from kitforge.kits.rlhf.roles.model_loading import find_tokenizer_or_none
from kitforge.kits.rlhf.roles.rewards import reward_members
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from kitforge.models.catalog import config_of_network
from kitforge.trainer.callbacks.callback import Callback, Event
from kitforge.trainer.callbacks.callback import RunContext as Running
from kitforge.trainer.run_folder import Run

# Roles that read the policy's tokens.
TOKEN_ROLES = ("reward", "reference", "teacher")


def check_role_tokenizers(options: StageOptions, roles: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a reference model or teacher with another tokenizer than the policy, a teacher with another
    chat template, and for a role whose vocabulary is smaller than its tokenizer's."""
    named = {
        name: getattr(options, name) for name in TOKEN_ROLES if isinstance(getattr(options, name, None), (str, list))
    }
    roles = {**named, **roles}
    members = {name: list(reward_members(roles.get(name)).values()) or [roles.get(name)] for name in TOKEN_ROLES}
    for name, member in ((name, member) for name, several in members.items() for member in several):
        # A member of a weighted sum is a pair of weight and reward.
        given = member[-1] if isinstance(member, (tuple, list)) and member else member
        own = _tokenizer_of(given)
        # A reward model with its own tokenizer reads text.
        if own is not None and own.fingerprint != tokenizer.fingerprint and name != "reward":
            raise ConfigError(
                f"the role {name} has another tokenizer than the policy",
                got=_tokenizer_text(own),
                expected=_tokenizer_text(tokenizer),
                fix="train it with the policy's tokenizer, as when it starts from the policy's run",
            )
        if name == "teacher" and own is not None and template_of(own).fingerprint != template_of(tokenizer).fingerprint:
            raise ConfigError(
                "the teacher has another chat template than the policy",
                got="another template in the teacher's folder",
                expected="the same, as prompts are written by the policy's",
                fix="copy the policy's template into the teacher's folder, or pass the teacher as a network",
            )
        model, wanted = given.model if isinstance(given, Run) else given, own or tokenizer
        network = model.backbone if isinstance(model, ValueHeadModel) else model
        if isinstance(network, CausalLM) and network.geometry.vocab_size < wanted.vocab_size:
            raise ConfigError(
                f"the vocabulary of the role {name} is too small",
                got=f"a vocabulary of {network.geometry.vocab_size}",
                expected=f"at least the tokenizer's {wanted.vocab_size}",
            )


def _tokenizer_of(given: Any) -> Tokenizer | None:
    if isinstance(given, Run):
        return cast(Tokenizer, given.processor)
    folder = user_path(given) if isinstance(given, (str, Path)) else None
    return None if folder is None or not folder.exists() else find_tokenizer_or_none(folder)


def _tokenizer_text(tokenizer: Tokenizer) -> str:
    return f"{type(tokenizer).__name__} of {tokenizer.vocab_size} tokens ({tokenizer.fingerprint[:8]})"


class DisableDropout(Callback):
    """Disables dropout, and logs it: ratios and rewards compare log-probs of the same policy. Decoders apply dropout
    only with a dropout key, which these tasks do not pass."""

    def __init__(self) -> None:
        self._rates: set[float] = set()

    def on_event(self, event: Event, run: Running) -> None:
        if event.kind == "start":
            configs = [config for each in run.model.modules() if (config := config_of_network(each)) is not None]
            layers = [each for each in run.model.modules() if isinstance(each, _DropoutNd)]
            asked = {value for each in configs for name, value in to_dict(each).items() if name.endswith("dropout")}
            self._rates = {rate for rate in asked | {layer.p for layer in layers} if rate}
            for layer in layers:
                layer.p = 0.0
        elif event.kind == "step" and self._rates:
            rates, self._rates = ", ".join(map(str, sorted(self._rates))), set()
            run.log_event("dropout", f"dropout {rates} of the model is disabled for this task")
