"""The options of the stages. Built from plain dicts, without Hydra."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from kitforge.core.nn.lora import LoraConfig
from kitforge.data.tokenizer import TokenizerConfig
from kitforge.foundation.config import check
from kitforge.inference.options import EngineOptions
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.rlhf.algorithms.importance_sampling import ImportanceSamplingOptions
from kitforge.kits.rlhf.algorithms.kl import KlEstimator
from kitforge.kits.rlhf.algorithms.kl_controllers import KlControllerOptions
from kitforge.kits.rlhf.algorithms.loss_aggregation import LossAggregation
from kitforge.kits.rlhf.algorithms.losses import ClipOptions, LossMode
from kitforge.kits.rlhf.algorithms.pass_at_k import EvaluationOptions
from kitforge.kits.rlhf.role_ranks import ROLES, RoleRanksOptions, rank_list
from kitforge.trainer.options import RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDatasetOptions:
    """Which rows, and how they are cut into batches."""

    train: Any = None  # a jsonl, json or parquet file, a folder, a glob, or a list of them
    eval: Any = None  # None: a share of the training rows
    batch_size: int = 8  # rows of a step
    sequence_length: int = 512  # the most tokens that a prompt and its response may have
    eval_fraction: float = 0.05  # share of the training rows kept for evaluation where data.eval is not given
    columns: dict[str, str] = field(default_factory=dict)  # our name of a column to the rows' own
    on_too_long: Literal["refuse", "drop"] = "refuse"  # rows of more than sequence_length tokens
    # Longer rows lose their first tokens (left) or their last ones (right); null: overlong says what becomes of them.
    truncation: Literal["left", "right"] | None = None
    on_invalid: Literal["refuse", "drop"] = (
        "refuse"  # rows that mean nothing: an empty response, one preferred to itself
    )
    shuffle: bool = True
    num_workers: int | None = None  # processes that tokenise; None: one per core

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length"):
            check(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "a whole number of at least 1")
        is_one = self.truncation is None or self.on_too_long == "refuse"
        check(is_one, "data.truncation", self.truncation, "null with data.on_too_long=drop")
        check(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0, below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Low-rank additions that are trained in place of the weights, which all roles then share."""

    rank: int = 0  # 0: the weights themselves are trained
    alpha: float = 16.0  # what is added counts alpha / rank
    target_modules: tuple[str, ...] = ("query", "value")  # the last names of the linear layers that get one
    path: str | None = None  # a folder of PEFT's to start from, of this rank, alpha and these layers

    def __post_init__(self) -> None:
        check(self.rank >= 0, "lora.rank", self.rank, "a whole number of at least 1, or 0 for none")
        check(self.is_on or self.path is None, "lora.path", self.path, "lora.rank beside it")

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0

    @property
    def config(self) -> LoraConfig:
        """What the core calls it."""
        return LoraConfig(rank=self.rank, alpha=self.alpha, target_modules=self.target_modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions(RunOptions):
    """What all stages have in common."""

    INFERENCE_ONLY_SECTIONS = ("inference",)

    model: dict[str, Any] = field(default_factory=dict)  # `family` and the options of that family's config
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: ChatDatasetOptions = field(default_factory=ChatDatasetOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    inference: InferenceOptions = field(default_factory=InferenceOptions)
    checkpoint: str | None = None  # weights to start from, to evaluate or to generate with
    prompt: Any = None  # text, or a list of texts, to continue; also for the samples of a report

    @property
    def starts_from_weights(self) -> bool:
        """Whether there is a network already: under a checkpoint, or handed over."""
        return self.checkpoint is not None or not self.model

    @property
    def learning_summary(self) -> str:
        """How fast it learns, in a line to show."""
        start = "weights" if self.starts_from_weights else "nothing"
        rate, decay = self.optimizer.learning_rate, self.optimizer.weight_decay
        return f"starts from {start}: learning rate {rate:g}, weight decay {decay:g}"

    @property
    def summary(self) -> str:
        """How fast it learns."""
        return self.learning_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTOptions(StageOptions):
    """All options of the task `sft`."""

    task: str = "sft"
    packing: bool = True  # several demonstrations in a row, which do not see one another


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardLossOptions:
    """What a reward model learns from pairs."""

    center_coefficient: float = 0.01  # how strongly scores are drawn around 0
    use_margins: bool = True  # the column `margin`, where rows have it, is asked of the scores
    normalize_rewards: bool = (
        True  # scores have mean 0 and deviation 1 over the training responses, stored with the model
    )

    def __post_init__(self) -> None:
        check(
            self.center_coefficient >= 0, "reward.center_coefficient", self.center_coefficient, "a number of at least 0"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOptions(StageOptions):
    """All options of the task `reward`."""

    task: str = "reward"
    reward: RewardLossOptions = field(default_factory=RewardLossOptions)
    output: str | None = None  # file .jsonl that `predict` writes


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLossOptions:
    """How a policy learns from pairs without a reward model."""

    loss: Literal["dpo", "ipo", "orpo", "simpo"] = "dpo"
    beta: float = 0.1  # the cost of leaving the reference; of simpo the scale of its rewards
    label_smoothing: float = 0.0  # of dpo: how often a label may be wrong
    rpo_alpha: float = 0.0  # of dpo: weight of the chosen response's mean loss a token beside it (RPO); 0: none
    simpo_gamma: float = 0.5  # of simpo: by how much rewards are to differ
    orpo_lambda: float = 0.1  # of orpo: the share of the odds ratio beside the likelihood of the chosen response

    def __post_init__(self) -> None:
        check(self.beta > 0, "preference.beta", self.beta, "a number above 0")
        check(
            0 <= self.label_smoothing < 0.5, "preference.label_smoothing", self.label_smoothing, "at least 0, below 0.5"
        )
        is_used = self.loss == "dpo" or self.label_smoothing == 0
        check(is_used, "preference.label_smoothing", self.label_smoothing, "0 with every loss but dpo")
        check(self.rpo_alpha >= 0, "preference.rpo_alpha", self.rpo_alpha, "a number of at least 0")
        is_used = self.loss == "dpo" or self.rpo_alpha == 0
        check(is_used, "preference.rpo_alpha", self.rpo_alpha, "0 with every loss but dpo")
        check(self.orpo_lambda > 0, "preference.orpo_lambda", self.orpo_lambda, "a number above 0")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a frozen policy."""
        return self.loss in ("dpo", "ipo")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceOptions(StageOptions):
    """All options of the tasks `dpo`, `ipo`, `orpo` and `simpo`."""

    task: str = "dpo"
    preference: PreferenceLossOptions = field(default_factory=PreferenceLossOptions)
    reference: str | None = None  # a run or a folder, frozen, that is compared with; None: what training begins with

    def __post_init__(self) -> None:
        is_used = self.preference.needs_reference or self.reference is None
        check(is_used, "reference", self.reference, f"none: {self.preference.loss} compares with nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoLossOptions:
    """How a policy learns from single answers that were found good or bad."""

    beta: float = 0.1  # the cost of leaving the reference
    # What an answer of each kind weighs; the rarer kind wants more, so that both weigh about the same.
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            check(getattr(self, name) > 0, f"kto.{name}", getattr(self, name), "a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class KTOOptions(StageOptions):
    """All options of the task `kto`."""

    task: str = "kto"
    kto: KtoLossOptions = field(default_factory=KtoLossOptions)
    reference: str | None = None  # a run or a folder, frozen, that is compared with; None: what training begins with

    def __post_init__(self) -> None:
        expected = "at least 2: the baseline takes each answer to another row's prompt"
        check(self.data.batch_size > 1, "data.batch_size", self.data.batch_size, expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradientOptions:
    """How rollouts become updates."""

    prompts_per_rollout: int = 16  # prompts that one round of rollouts answers, over all ranks
    num_generations: int = 1  # answers to each
    epochs: int = 1  # passes over the answers of a round
    num_minibatches: int = 1  # updates of each pass
    # Tokens of one forward pass, filling among them, in place of trainer.micro_batch_size answers; those of reference,
    # critic and reward models over a round too.
    max_tokens_per_microbatch: int | None = None
    # Log-probabilities that ratios start from: those that tokens were drawn with, or the trainer's, found once more.
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce"] = "gae"  # gae: with a critic
    loss_aggregation: LossAggregation = "token-mean"
    # ppo: a clipped ratio for each token. gspo: one for each answer, normalised by its length. cispo: a clipped ratio
    # only weighs each token, none of which loses its gradient.
    loss_mode: LossMode = "ppo"
    clip_ratio_low: float = 0.2  # the ratio counts down to 1 - this; 1: there is no lower bound, as CISPO wants it
    clip_ratio_high: float = 0.2  # and up to 1 + this; more than clip_ratio_low keeps entropy up (DAPO)
    dual_clip: float | None = None  # at negative advantages the loss ends at this * |advantage| (Ye et al., 2020)
    # A round makes no further update once approx_kl exceeds 1.5 times this, in nats a token; None: it makes all.
    target_kl: float | None = None
    value_clip_range: float | None = 0.2
    vf_coef: float = 0.5  # of the critic's loss beside the policy's
    gamma: float = 1.0
    gae_lambda: float = 0.95  # lambda of the policy's advantages
    value_gae_lambda: float | None = None  # lambda of the critic's targets; None: the same
    # The policy's lambda is 1 - 1 / (alpha * tokens of the completion) instead of `gae_lambda` (VAPO: 0.05, with a
    # value_gae_lambda of 1); None: it is `gae_lambda`.
    length_adaptive_alpha: float | None = None
    whiten_advantages: bool = False  # over the tokens of a round, of all ranks
    whiten_rewards: bool = False  # the same, their mean left where it is
    critic_warmup: int = 0  # rounds in which only the critic learns
    entropy_coef: float = 0.0  # a bonus for keeping options open
    missing_eos_penalty: float = 0.0  # taken from the score of an answer that did not end
    overlong_buffer: int = 0  # tokens before the longest answer over which a penalty rises to 1; 0: none
    mask_truncated_completions: bool = False  # answers that did not end are not trained on (overlong filtering)
    filter_zero_variance_groups: bool = False  # answers to a prompt that all have the same reward count for nothing
    # Batches of prompts_per_step prompts that are answered at the most for one round, until prompts_per_step groups of
    # answers differ in their rewards (dynamic sampling of DAPO); 1: groups without a difference are not replaced.
    max_num_gen_batches: int = 1
    eval: EvaluationOptions = field(default_factory=EvaluationOptions)

    def __post_init__(self) -> None:
        for name in ("prompts_per_rollout", "num_generations", "epochs", "num_minibatches", "max_num_gen_batches"):
            check(getattr(self, name) > 0, f"rl.{name}", getattr(self, name), "a whole number of at least 1")
        for name in ("gamma", "gae_lambda"):
            check(0 <= getattr(self, name) <= 1, f"rl.{name}", getattr(self, name), "between 0 and 1")
        answers = self.prompts_per_rollout * self.num_generations
        check(
            answers % self.num_minibatches == 0,
            "rl.num_minibatches",
            self.num_minibatches,
            f"a divisor of {answers} answers",
        )
        compares = self.advantage in ("grpo", "dr_grpo", "rloo")
        enough = self.num_generations > 1 or not compares
        check(enough, "rl.num_generations", self.num_generations, f"at least 2 with rl.advantage={self.advantage}")
        check(
            compares or not self.filter_zero_variance_groups,
            "rl.filter_zero_variance_groups",
            True,
            "false without groups",
        )
        replaces, most = self.max_num_gen_batches > 1, self.max_num_gen_batches
        expected = "1, or rl.filter_zero_variance_groups=true, whose dropped groups it replaces"
        check(self.filter_zero_variance_groups or not replaces, "rl.max_num_gen_batches", most, expected)
        bounds = self.clip.dual is None or self.loss_mode != "cispo"
        check(bounds, "rl.dual_clip", self.clip.dual, "none with rl.loss_mode=cispo, whose loss has no such bound")
        alpha, adapts = self.length_adaptive_alpha, self.advantage == "gae"
        is_sound = alpha is None or (alpha > 0 and adapts)
        check(is_sound, "rl.length_adaptive_alpha", alpha, "a number above 0 with rl.advantage=gae, or null")
        check(self.target_kl is None or self.target_kl > 0, "rl.target_kl", self.target_kl, "above 0, or null")
        warms = self.critic_warmup == 0 or self.advantage == "gae"
        check(warms, "rl.critic_warmup", self.critic_warmup, "0 without a critic")

    @property
    def clip(self) -> ClipOptions:
        """The bounds of the ratio."""
        return ClipOptions(low=self.clip_ratio_low, high=self.clip_ratio_high, dual=self.dual_clip)

    @property
    def has_critic(self) -> bool:
        """Whether a second network learns what to expect."""
        return self.advantage == "gae"

    @property
    def shapes_rewards(self) -> bool:
        """Whether answers pay for having no end, or for their length."""
        return self.missing_eos_penalty != 0 or self.overlong_buffer > 0

    @property
    def updates_per_rollout(self) -> int:
        """Steps of the optimizer over the answers of one round."""
        return self.epochs * self.num_minibatches


@dataclass(frozen=True, slots=True, kw_only=True)
class PtxOptions:
    """Text that the policy must not forget, in its loss beside the answers."""

    data: Any = (
        None  # rows as `sft` reads them: a file, a folder, a glob, or a list of them; the role `ptx` comes first
    )
    coef: float = 0.0  # of their mean loss a token beside the policy's loss; 0: none
    batch_size: int = 8  # rows beside each update, over all ranks

    def __post_init__(self) -> None:
        check(self.coef >= 0, "ptx.coef", self.coef, "a number of at least 0")
        check(self.batch_size > 0, "ptx.batch_size", self.batch_size, "a whole number of at least 1")
        check(self.data is None or self.coef > 0, "ptx.coef", self.coef, "above 0 where ptx.data names rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class KlOptions:
    """What keeps the policy near the one that it began as."""

    estimator: KlEstimator = "k1"
    apply_to: Literal["reward", "loss"] = "reward"  # taken from the rewards of tokens, or added to the loss
    # As a loss: weight the estimate by the ratio to the policy that drew, so that its gradient is that of KL(policy ||
    # reference). False: differentiate the estimate as it stands; with k3 that is GRPO as published.
    use_bias_correction: bool = True
    # With a coefficient of 0 there is no reference network, and no KL in the metrics. True: hold one and measure.
    measure: bool = False
    controller: Literal["fixed", "adaptive"] = "fixed"  # whether the coefficient is steered to a target
    coef: float = 0.05  # KL coefficient; where an adaptive one begins
    target: float = 6.0  # KL of a sequence, in nats, that an adaptive coefficient steers to
    horizon: int = 10000  # sequences over which an adaptive coefficient would double or vanish at the most

    def __post_init__(self) -> None:
        self.controller_options()
        regularises = self.use_bias_correction or self.apply_to == "reward" or self.estimator != "k1"
        expected = "k2 or k3 with kl.use_bias_correction=false: the mean gradient of k1 alone is zero"
        check(regularises, "kl.estimator", self.estimator, expected)

    def controller_options(self) -> KlControllerOptions:
        """How the coefficient is steered. Raises ConfigError for values out of range."""
        return KlControllerOptions(kind=self.controller, coef=self.coef, target=self.target, horizon=self.horizon)

    @property
    def is_on(self) -> bool:
        """Whether distance from the reference costs anything."""
        return self.coef > 0

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is held and asked."""
        return self.is_on or self.measure


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions(InferenceOptions):
    """How answers are drawn; they are trained in the very distribution that they are drawn from."""

    temperature: float = 1.0
    max_new_tokens: int = 64
    max_turns: int = 8  # answers in an episode, where there is an environment; max_new_tokens is that of each
    # Answers are drawn, beside the training, by the policy of so many rounds ago; 0: by the one that they train.
    max_staleness: int = 0
    keep_rollout_files: int = 8  # rounds whose answers stay: the latest, and behind each kept checkpoint; 0: none
    # Nobody waits for the first token of a rollout, so that many are written at once.
    engine: EngineOptions = field(default_factory=lambda: EngineOptions(max_num_seqs=64, max_num_batched_tokens=4096))

    def __post_init__(self) -> None:
        InferenceOptions.__post_init__(self)
        check(self.temperature > 0, "rollout.temperature", self.temperature, "a number above 0")
        check(self.max_turns > 0, "rollout.max_turns", self.max_turns, "a whole number of at least 1")
        check(self.max_staleness >= 0, "rollout.max_staleness", self.max_staleness, "a whole number of at least 0")
        check(
            self.keep_rollout_files >= 0,
            "rollout.keep_rollout_files",
            self.keep_rollout_files,
            "a whole number of at least 0",
        )
        # A stop string changes where an answer ends, and not what its tokens are drawn from.
        for name in ("top_k", "top_p", "min_p", "needs_history", "logit_bias"):
            expected = "unset, or tokens are drawn from another distribution than the one that is trained"
            check(not getattr(self, name), f"rollout.{name}", getattr(self, name), expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentOptions:
    """How the steps of environments and tools are run."""

    max_workers: int = 16  # threads of a rank in which steps run; async steps take one each too
    timeout: float | None = 60.0  # seconds that a step may take; null: any time
    # The reward of a turn whose step raised or took too long, which ends the episode; raise: end the run.
    on_error: float | Literal["raise"] = 0.0

    def __post_init__(self) -> None:
        check(self.max_workers > 0, "environment.max_workers", self.max_workers, "a whole number of at least 1")
        check(self.timeout is None or self.timeout > 0, "environment.timeout", self.timeout, "above 0, or null")
        is_sound = isinstance(self.on_error, str) or math.isfinite(self.on_error)
        check(is_sound, "environment.on_error", self.on_error, "a finite number, or raise")


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptions:
    """How a critic is trained beside its policy, by the same optimizer and schedule."""

    learning_rate: float | None = None  # the peak; None: optimizer.learning_rate
    max_grad_norm: float | None = None  # largest norm of its gradients; None: trainer.max_grad_norm; 0: no clipping

    def __post_init__(self) -> None:
        rate, norm = self.learning_rate, self.max_grad_norm
        check(rate is None or 0 < rate < math.inf, "critic.learning_rate", rate, "a number above 0")
        check(norm is None or norm >= 0, "critic.max_grad_norm", norm, "a number of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOptions(StageOptions):
    """All options of the task `ppo` and its relatives."""

    task: str = "ppo"
    rl: PolicyGradientOptions = field(default_factory=PolicyGradientOptions)
    kl: KlOptions = field(default_factory=KlOptions)
    importance_sampling: ImportanceSamplingOptions = field(default_factory=ImportanceSamplingOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    ptx: PtxOptions = field(default_factory=PtxOptions)
    # A run of the task reward, a *ForSequenceClassification folder, exact, gsm8k, lowercase, package.module:function,
    # or a list of them, which are added up; the role `reward` comes first.
    reward: Any = None
    reference: str | None = None  # a run or a folder, frozen, that is compared with; None: what training begins with
    role_ranks: RoleRanksOptions = field(default_factory=RoleRanksOptions)
    critic: CriticOptions = field(default_factory=CriticOptions)

    def __post_init__(self) -> None:
        is_used = self.rl.has_critic or self.critic == CriticOptions()
        check(is_used, "critic", self.critic, f"nothing with rl.advantage={self.rl.advantage}, which has no critic")
        named = {rank for name in ROLES for rank in self.role_ranks.ranks(name, self.parallel.world_size)}
        idle = sorted(set(range(self.num_ranks)) - set(range(self.parallel.world_size)) - named)
        got = self.role_ranks.describe(self.parallel.world_size)
        expected = (
            f"work for {rank_list(idle)} too, between parallel.* ({self.parallel.describe()}) and the last rank named"
        )
        check(not idle, "role_ranks", got, expected)
        corrects = self.importance_sampling.mode != "none"
        needs = "none, or rl.old_logprobs=recompute, which tells how far the two are apart"
        check(
            not corrects or self.rl.old_logprobs == "recompute",
            "importance_sampling.mode",
            self.importance_sampling.mode,
            needs,
        )
        stale = self.rollout.max_staleness
        needs = (
            "0, or importance_sampling.mode=truncate and rl.old_logprobs=recompute, which make up for an older policy"
        )
        check(corrects or not stale, "rollout.max_staleness", stale, needs)
        # How many batches of prompts a round needs is known only when the round before it has been trained on.
        is_known = not stale or self.rl.max_num_gen_batches == 1
        check(is_known, "rollout.max_staleness", stale, "0 beside rl.max_num_gen_batches above 1")
        ranks = self.role_ranks.reference
        needs = "none: with kl.coef=0 there is no reference, unless kl.measure=true"
        check(ranks is None or self.kl.needs_reference, "role_ranks.reference", ranks, needs)
        if (most := self.rl.max_tokens_per_microbatch) is not None:
            size, longest = self.trainer.micro_batch_size, self.data.sequence_length
            check(size is None, "trainer.micro_batch_size", size, "none beside rl.max_tokens_per_microbatch")
            expected = f"at least data.sequence_length={longest}, which one answer and its prompt may have"
            check(most >= longest, "rl.max_tokens_per_microbatch", most, expected)

    @property
    def num_ranks(self) -> int:
        """Those that train, and those beside them."""
        return max(self.parallel.world_size, self.role_ranks.num_ranks(self.parallel.world_size))

    @property
    def summary(self) -> str:
        """What a round comes to, and who has a part in it."""
        rl = self.rl
        answers = rl.prompts_per_rollout * rl.num_generations
        words = (
            f"a round: {rl.prompts_per_rollout} prompts x {rl.num_generations} = {answers} answers; "
            f"{rl.epochs} epochs x {rl.num_minibatches} minibatches = {rl.updates_per_rollout} updates "
            f"of {answers // rl.num_minibatches} answers"
        )
        if rl.max_tokens_per_microbatch is not None:
            words += f", at most {rl.max_tokens_per_microbatch} tokens at once"
        elif self.trainer.micro_batch_size is not None:
            words += f", {self.trainer.micro_batch_size} at once"
        words += f", beside {self.ptx.batch_size} rows of pretraining" if self.ptx.coef else ""
        placement = self.role_ranks.describe(self.parallel.world_size)
        rate = self.critic.learning_rate
        learning = self.learning_summary + (f", of the critic {rate:g}" if rate is not None else "")
        return "; ".join(each for each in (words, learning, placement) if each)
