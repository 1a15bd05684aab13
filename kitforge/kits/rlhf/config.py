"""Options of the RLHF tasks. Built from plain dicts, without Hydra."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from kitforge.data.schedule import OnSourceEnd
from kitforge.data.tokenizers.loading import TokenizerConfig
from kitforge.foundation.config import check, check_least
from kitforge.foundation.types import OnInvalid
from kitforge.foundation.untrusted import names_function
from kitforge.inference.options import CacheSizeOptions, EngineOptions
from kitforge.inference.server.options import HttpOptions
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.language_model import NetworkOptions
from kitforge.kits.rlhf.algorithms.kl import KlControllerOptions, KlEstimator
from kitforge.kits.rlhf.algorithms.losses import ClipOptions, ImportanceSamplingOptions, LossAggregation, LossMode
from kitforge.kits.rlhf.algorithms.pass_at_k import EvaluationOptions
from kitforge.kits.rlhf.role_ranks import ROLES, RoleRanksOptions, rank_list


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDatasetOptions:
    """The dataset and its batches."""

    # A jsonl, json, csv, tsv or parquet file, a folder, a glob, a list, or a mixture [{source: ..., weight: 0.7}, ...]
    train: Any = None
    eval: Any = None  # like data.train; null: data.eval_fraction of the training rows
    batch_size: int = 8  # rows per step, over all ranks
    sequence_length: int = 512  # maximum number of tokens of prompt and completion
    eval_fraction: float = 0.05  # fraction of the training rows held out without data.eval
    columns: dict[str, str] = field(default_factory=dict)  # maps our column names to those of the dataset
    # Rows longer than data.sequence_length; cut_left and cut_right truncate them at their start and end.
    on_too_long: Literal["refuse", "drop", "cut_left", "cut_right"] = "refuse"
    # Rows with an empty completion, or with the same completion as chosen and rejected.
    on_invalid: OnInvalid = "refuse"
    shuffle: bool = True
    # When a source of a mixture has no further rows: read it again in another order, or end the training.
    on_source_end: OnSourceEnd = "restart"
    num_workers: int | None = None  # tokenizer processes; null: one per core

    def __post_init__(self) -> None:
        check_least("data", self, 1, "batch_size", "sequence_length")
        check(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0, below 1")

    @property
    def truncation(self) -> str | None:
        """The side at which longer rows are cut: left or right; None: they are not."""
        return self.on_too_long.removeprefix("cut_") if self.on_too_long.startswith("cut_") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions(NetworkOptions):
    """Options that all RLHF tasks share."""

    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: ChatDatasetOptions = field(default_factory=ChatDatasetOptions)
    format: Literal["huggingface", "gguf"] = "huggingface"  # of `export`

    @property
    def starts_from_weights(self) -> bool:
        """Whether training starts from pretrained weights: a checkpoint or a given model."""
        return self.checkpoint is not None or not self.model

    @property
    def learning_summary(self) -> str:
        """Initialization, learning rate and weight decay, in one line."""
        start = "weights" if self.starts_from_weights else "nothing"
        rate, decay = self.optimizer.learning_rate, self.optimizer.weight_decay
        return f"starts from {start}: learning rate {rate:g}, weight decay {decay:g}"

    @property
    def summary(self) -> str:
        """One line shown at the start of a run."""
        return self.learning_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTOptions(StageOptions):
    """All options of the task `sft`."""

    task: str = "sft"
    packing: bool = True  # pack several examples into one row; they do not attend to each other


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardLossOptions:
    """The loss of the reward model on preference pairs."""

    center_coefficient: float = 0.01  # centers rewards at 0 (Eisenstein et al., 2023); 0 disables it
    use_margins: bool = True  # subtract the column `margin`, where rows have it
    # Normalize rewards to mean 0 and standard deviation 1 over training completions; stored with the model.
    normalize_rewards: bool = True

    def __post_init__(self) -> None:
        center = self.center_coefficient
        check(center >= 0, "reward.center_coefficient", center, "a number of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOptions(StageOptions):
    """All options of the task `reward`."""

    task: str = "reward"
    reward: RewardLossOptions = field(default_factory=RewardLossOptions)
    output: str | None = None  # .jsonl file that `kitforge predict` writes
    port: int = 8000  # port of `serve`; 0: any free port
    serve: HttpOptions = field(default_factory=HttpOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLossOptions:
    """Preference optimization on pairs, without a reward model."""

    loss: Literal["dpo", "ipo", "orpo", "simpo"] = "dpo"
    beta: float = 0.1  # deviation from the reference model; lower allows more. SimPO: reward scale
    label_smoothing: float = 0.0  # cDPO: probability that a preference label is wrong
    rpo_alpha: float = 0.0  # RPO: coefficient of the mean NLL of the chosen completion, with dpo; 0 disables it
    simpo_gamma: float = 0.5  # SimPO: target reward margin
    orpo_lambda: float = 0.1  # ORPO: coefficient of the odds-ratio loss

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
        """Whether the loss needs a reference model."""
        return self.loss in ("dpo", "ipo")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceOptions(StageOptions):
    """All options of the tasks `dpo`, `ipo`, `orpo` and `simpo`."""

    task: str = "dpo"
    preference: PreferenceLossOptions = field(default_factory=PreferenceLossOptions)
    reference: str | None = None  # reference model: a run or folder; null: the initial policy

    def __post_init__(self) -> None:
        is_used = self.preference.needs_reference or self.reference is None
        check(is_used, "reference", self.reference, f"null: {self.preference.loss} has no reference model")


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoLossOptions:
    """KTO: preference optimization on unpaired completions labelled desirable or undesirable."""

    beta: float = 0.1  # deviation from the reference model; lower allows more
    # Loss weights of desirable and undesirable completions; weight the rarer label higher.
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
    reference: str | None = None  # reference model: a run or folder; null: the initial policy

    def __post_init__(self) -> None:
        expected = "at least 2: the KL baseline pairs each prompt with the completion of another row"
        check(self.data.batch_size > 1, "data.batch_size", self.data.batch_size, expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradientOptions:
    """Policy gradient: rollout batches, advantages and losses of PPO, GRPO, Dr. GRPO, DAPO, RLOO and REINFORCE++."""

    prompts_per_rollout: int = 16  # prompts per rollout batch, over all ranks
    num_generations: int = 1  # number of completions per prompt
    epochs: int = 1  # PPO epochs: passes over each rollout batch
    num_minibatches: int = 1  # minibatches, and updates, per epoch
    # Maximum number of tokens per micro-batch, instead of trainer.micro_batch_size; also for the forward passes of
    # reference, critic and reward models. With a critic padding counts; without, a prompt counts once in a micro-batch.
    max_tokens_per_microbatch: int | None = None
    # Old log-probs in the PPO ratio: of the rollout engine, or recomputed by the trainer before the first update.
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce"] = "gae"  # gae trains a critic
    # mean of the token losses; constant: divided by the longest completion allowed
    loss_aggregation: LossAggregation = "token-mean"
    # ppo: clipped surrogate per token. gspo: with the length-normalized ratio of the sequence. cispo: the clipped ratio
    # weights REINFORCE, so that no token loses its gradient.
    loss_mode: LossMode = "ppo"
    clip_ratio_low: float = 0.2  # lower clip range: the ratio is clipped at 1 - this; 1: no lower bound (CISPO)
    clip_ratio_high: float = 0.2  # upper clip range: the ratio is clipped at 1 + this; clip-higher of DAPO: 0.28
    dual_clip: float | None = None  # dual-clip PPO: bounds the loss at this * |advantage| for negative advantages
    # Early stopping: skip the remaining updates of a rollout batch once approx_kl exceeds 1.5 times this; null: off.
    target_kl: float | None = None
    value_clip_range: float | None = 0.2  # clip range of the value loss; null: no clipping
    vf_coef: float = 0.5  # value loss coefficient
    gamma: float = 1.0  # discount factor
    gae_lambda: float = 0.95  # GAE lambda
    whiten_advantages: bool = False  # whiten advantages over the tokens of the rollout batch, all ranks
    critic_warmup: int = 0  # rollout batches in which only the critic is trained
    entropy_coef: float = 0.0  # entropy bonus coefficient
    echo_coef: float = 0.0  # coefficient of the cross-entropy on the tokens that tools and environments answer; 0: off
    missing_eos_penalty: float = 0.0  # subtracted from the reward of a completion without an EOS token
    overlong_buffer: int = 0  # DAPO: length penalty rises to 1 over the last N tokens of max_new_tokens
    mask_truncated_completions: bool = False  # exclude completions without an EOS token from the loss
    filter_zero_variance_groups: bool = False  # exclude groups whose completions all have the same reward
    # Dynamic sampling (DAPO): generate at most this many batches of prompts until prompts_per_rollout groups have
    # different rewards; 1: filtered groups are not replaced.
    max_num_gen_batches: int = 1
    eval: EvaluationOptions = field(default_factory=EvaluationOptions)

    def __post_init__(self) -> None:
        counts = ("prompts_per_rollout", "num_generations", "epochs", "num_minibatches", "max_num_gen_batches")
        check_least("rl", self, 1, *counts)
        check_least("rl", self, 0, "critic_warmup", "overlong_buffer")
        for name in ("gamma", "gae_lambda"):
            check(0 <= getattr(self, name) <= 1, f"rl.{name}", getattr(self, name), "between 0 and 1")
        for name in ("vf_coef", "echo_coef"):
            check(getattr(self, name) >= 0, f"rl.{name}", getattr(self, name), "a number of at least 0")
        clip = self.value_clip_range
        check(clip is None or clip > 0, "rl.value_clip_range", clip, "above 0, or null")
        completions = self.prompts_per_rollout * self.num_generations
        is_whole, expected = completions % self.num_minibatches == 0, f"a divisor of {completions} completions"
        check(is_whole, "rl.num_minibatches", self.num_minibatches, expected)
        compares = self.advantage in ("grpo", "dr_grpo", "rloo")
        enough = self.num_generations > 1 or not compares
        expected, fix = f"at least 2 with rl.advantage={self.advantage}", "or add rl.advantage=reinforce"
        check(enough, "rl.num_generations", self.num_generations, expected, fix)
        has_groups = compares or not self.filter_zero_variance_groups
        check(has_groups, "rl.filter_zero_variance_groups", True, "false without groups")
        replaces, most = self.max_num_gen_batches > 1, self.max_num_gen_batches
        expected = "1, or rl.filter_zero_variance_groups=true, whose filtered groups it replaces"
        check(self.filter_zero_variance_groups or not replaces, "rl.max_num_gen_batches", most, expected)
        bounds = self.clip.dual is None or self.loss_mode != "cispo"
        check(bounds, "rl.dual_clip", self.clip.dual, "none with rl.loss_mode=cispo, whose loss has no such bound")
        check(self.target_kl is None or self.target_kl > 0, "rl.target_kl", self.target_kl, "above 0, or null")
        warms = self.critic_warmup == 0 or self.advantage == "gae"
        check(warms, "rl.critic_warmup", self.critic_warmup, "0 without a critic")

    @property
    def clip(self) -> ClipOptions:
        """The clip range of the ratio."""
        return ClipOptions(low=self.clip_ratio_low, high=self.clip_ratio_high, dual=self.dual_clip)

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.advantage == "gae"

    @property
    def shapes_rewards(self) -> bool:
        """Whether rewards have a missing-EOS or length penalty."""
        return self.missing_eos_penalty != 0 or self.overlong_buffer > 0

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.epochs * self.num_minibatches


@dataclass(frozen=True, slots=True, kw_only=True)
class PtxOptions:
    """Pretraining (ptx) loss of InstructGPT, added to the policy loss."""

    data: Any = None  # rows as `sft` reads them: a file, a folder, a glob, or a list; the role `ptx` takes precedence
    coef: float = 0.0  # coefficient of the ptx cross-entropy; 0 disables it
    batch_size: int = 8  # rows per update, over all ranks

    def __post_init__(self) -> None:
        check(self.coef >= 0, "ptx.coef", self.coef, "a number of at least 0")
        check_least("ptx", self, 1, "batch_size")
        check(self.data is None or self.coef > 0, "ptx.coef", self.coef, "above 0 with ptx.data")


@dataclass(frozen=True, slots=True, kw_only=True)
class KlOptions(KlControllerOptions):
    """KL regularization against the reference model."""

    estimator: KlEstimator = "k1"  # KL estimator (Schulman, 2020)
    apply_to: Literal["reward", "loss"] = "reward"  # subtract the KL from the token rewards, or add it to the loss
    # KL loss with importance weights, so that its gradient is that of KL(policy || reference). false: differentiate the
    # estimate itself; with k3 that is GRPO as published.
    use_bias_correction: bool = True
    # With kl.coef=0 no reference model is loaded and no KL is logged; true loads it and logs the KL.
    measure: bool = False

    def __post_init__(self) -> None:
        KlControllerOptions.__post_init__(self)
        regularises = self.use_bias_correction or self.apply_to == "reward" or self.estimator != "k1"
        expected = "k2 or k3 with kl.use_bias_correction=false: the mean gradient of k1 alone is zero"
        check(regularises, "kl.estimator", self.estimator, expected)

    @property
    def is_on(self) -> bool:
        """Whether the KL coefficient is above 0."""
        return self.coef > 0

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is loaded."""
        return self.is_on or self.measure


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """Generation of rollouts. Sampling and training use the same distribution, which only the temperature shapes."""

    temperature: float = 1.0  # sampling temperature, also of the log-probs in training
    max_new_tokens: int = 64  # maximum completion length
    stop: tuple[str, ...] = ()  # strings that end a completion
    max_turns: int = 8  # maximum turns per episode of an environment; max_new_tokens is per turn
    # Asynchronous rollouts: generate with the policy of this many rollout batches ago, during training; 0: on-policy.
    max_staleness: int = 0
    keep_rollout_files: int = 8  # rollout files kept: the latest, and after each kept checkpoint
    engine: CacheSizeOptions = field(default_factory=CacheSizeOptions)

    def __post_init__(self) -> None:
        check(self.temperature > 0, "rollout.temperature", self.temperature, "a number above 0")
        check(all(self.stop), "rollout.stop", list(self.stop), "strings that are not empty")
        check_least("rollout", self, 1, "max_new_tokens", "max_turns")
        check_least("rollout", self, 0, "max_staleness", "keep_rollout_files")
        # Checks its numbers.
        _ = self.engine_options

    @property
    def engine_options(self) -> EngineOptions:
        """Those of the engine. Throughput matters more than latency: many tokens per step."""
        size, most = self.engine.kv_cache_bytes, self.engine.max_num_seqs
        return EngineOptions(kv_cache_bytes=size, max_num_seqs=most, max_num_batched_tokens=max(4096, most or 1))

    def sampling(self, temperature: float | None) -> InferenceOptions:
        """The options of a request. A given temperature may be 0, as those completions are not trained on."""
        heat = self.temperature if temperature is None else temperature
        return InferenceOptions(temperature=heat, max_new_tokens=self.max_new_tokens, stop=self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentOptions:
    """Execution of environment and tool steps."""

    name: str | None = None  # package.module:Class to play with; null: the role environment, if there is one
    max_workers: int = 16  # threads per rank; an async step takes one too
    timeout: float | None = 60.0  # seconds per step; null: no limit
    max_episodes: int | None = None  # at once per rank, those of whole prompts; null: all of a rollout batch
    # Reward of a turn whose step raised or timed out, which ends the episode; raise: abort the run.
    on_error: float | Literal["raise"] = 0.0
    # Calls in a row whose tool raised that are told to the policy; after the next one the step fails.
    max_consecutive_errors: int = 3

    def __post_init__(self) -> None:
        is_class = self.name is None or names_function(self.name)
        check(is_class, "environment.name", self.name, "package.module:Class, or file.py:Class of the current folder")
        check_least("environment", self, 1, "max_workers", "max_episodes")
        check_least("environment", self, 0, "max_consecutive_errors")
        check(self.timeout is None or self.timeout > 0, "environment.timeout", self.timeout, "above 0, or null")
        is_sound = isinstance(self.on_error, str) or math.isfinite(self.on_error)
        check(is_sound, "environment.on_error", self.on_error, "a finite number, or raise")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTestsOptions:
    """The reward `python_tests`, which runs code of completions."""

    timeout: float = 10.0  # seconds for the tests of a completion
    memory_bytes: int = 2**30  # limit of each of its processes
    # Where the machine cannot isolate these processes: run them with limits alone. false: refuse.
    allow_unisolated: bool = False

    def __post_init__(self) -> None:
        check(0 < self.timeout < math.inf, "python_tests.timeout", self.timeout, "a number of seconds above 0")
        check(self.memory_bytes >= 2**27, "python_tests.memory_bytes", self.memory_bytes, f"at least {2**27}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptions:
    """The critic's own settings; optimizer and schedule are those of the policy."""

    learning_rate: float | None = None  # peak learning rate of the critic; null: optimizer.learning_rate
    max_grad_norm: float | None = None  # null: trainer.max_grad_norm; 0: no clipping

    def __post_init__(self) -> None:
        rate, norm = self.learning_rate, self.max_grad_norm
        check(rate is None or 0 < rate < math.inf, "critic.learning_rate", rate, "a number above 0")
        check(norm is None or norm >= 0, "critic.max_grad_norm", norm, "a number of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOptions(StageOptions):
    """All options of the tasks `ppo`, `grpo`, `dr_grpo`, `dapo`, `rloo` and `reinforce_pp`."""

    task: str = "ppo"
    rl: PolicyGradientOptions = field(default_factory=PolicyGradientOptions)
    kl: KlOptions = field(default_factory=KlOptions)
    importance_sampling: ImportanceSamplingOptions = field(default_factory=ImportanceSamplingOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    ptx: PtxOptions = field(default_factory=PtxOptions)
    # Reward: a run of the task reward, a *ForSequenceClassification folder, exact, gsm8k, math, python_tests, lowercase
    # or package.module:function, or a list whose rewards are summed; the role `reward` takes precedence.
    reward: Any = None
    python_tests: PythonTestsOptions = field(default_factory=PythonTestsOptions)
    reference: str | None = None  # reference model: a run or folder; null: the initial policy
    role_ranks: RoleRanksOptions = field(default_factory=RoleRanksOptions)
    critic: CriticOptions = field(default_factory=CriticOptions)

    def __post_init__(self) -> None:
        is_used = self.rl.has_critic or self.critic == CriticOptions()
        check(is_used, "critic", self.critic, f"nothing with rl.advantage={self.rl.advantage}, which has no critic")
        named = {rank for name in ROLES for rank in self.role_ranks.ranks(name, self.parallel.world_size)}
        idle = sorted(set(range(self.num_ranks)) - set(range(self.parallel.world_size)) - named)
        got = self.role_ranks.describe(self.parallel.world_size)
        expected = f"a role for {rank_list(idle)} too, or fewer ranks in parallel.* ({self.parallel.describe()})"
        check(not idle, "role_ranks", got, expected)
        corrects = self.importance_sampling.mode != "none"
        needs = "none, or rl.old_logprobs=recompute, whose log-probs give the importance ratio"
        check(
            not corrects or self.rl.old_logprobs == "recompute",
            "importance_sampling.mode",
            self.importance_sampling.mode,
            needs,
        )
        stale = self.rollout.max_staleness
        needs = "0, or importance_sampling.mode=truncate and rl.old_logprobs=recompute, which correct for staleness"
        check(corrects or not stale, "rollout.max_staleness", stale, needs)
        # Dynamic sampling knows the first prompt of a rollout batch only when the one before it is complete.
        is_known = not stale or self.rl.max_num_gen_batches == 1
        check(is_known, "rollout.max_staleness", stale, "0 with rl.max_num_gen_batches above 1")
        ranks = self.role_ranks.reference
        needs = "none: with kl.coef=0 there is no reference, unless kl.measure=true"
        check(ranks is None or self.kl.needs_reference, "role_ranks.reference", ranks, needs)
        if (most := self.rl.max_tokens_per_microbatch) is not None:
            size, longest = self.trainer.micro_batch_size, self.data.sequence_length
            check(size is None, "trainer.micro_batch_size", size, "null with rl.max_tokens_per_microbatch")
            expected = f"at least data.sequence_length={longest}, the maximum length of one row"
            check(most >= longest, "rl.max_tokens_per_microbatch", most, expected)

    @property
    def num_ranks(self) -> int:
        """Training and inference-only ranks."""
        size = self.parallel.world_size
        return max(size, *(rank + 1 for name in ROLES for rank in self.role_ranks.ranks(name, size)))

    @property
    def summary(self) -> str:
        """Sizes of a rollout batch and its updates, learning rates, and the placement of roles."""
        rl = self.rl
        completions = rl.prompts_per_rollout * rl.num_generations
        sizes = (
            f"rollout batch: {rl.prompts_per_rollout} prompts x {rl.num_generations} = {completions} completions; "
            f"{rl.epochs} epochs x {rl.num_minibatches} minibatches = {rl.updates_per_rollout} updates "
            f"of {completions // rl.num_minibatches} completions"
        )
        if rl.max_tokens_per_microbatch is not None:
            sizes += f", at most {rl.max_tokens_per_microbatch} tokens per micro-batch"
        elif self.trainer.micro_batch_size is not None:
            sizes += f", {self.trainer.micro_batch_size} per micro-batch"
        sizes += f", and {self.ptx.batch_size} ptx rows" if self.ptx.coef else ""
        placement = self.role_ranks.describe(self.parallel.world_size)
        rate = self.critic.learning_rate
        learning = self.learning_summary + (f", critic learning rate {rate:g}" if rate is not None else "")
        return "; ".join(each for each in (sizes, learning, placement) if each)
