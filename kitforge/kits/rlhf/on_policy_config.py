"""Options of the tasks that train on rollouts with another loss than a policy gradient."""

from dataclasses import dataclass, field

from kitforge.foundation.config import check
from kitforge.kits.rlhf.config import KlOptions, PolicyGradientOptions, PreferenceLossOptions, RLOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillLossOptions:
    """On-policy distillation (Agarwal et al., 2024): the divergence of student q and teacher p at each token."""

    # 1: KL(q || p), reverse; 0: KL(p || q), forward; between: beta KL(p || m) + (1 - beta) KL(q || m) for the mixture
    # m = beta p + (1 - beta) q. Over all ids of the tokenizer, at rollout.temperature.
    beta: float = 1.0
    reward_coef: float = 0.0  # coefficient of the policy gradient of a reward; 0: a reward is only logged
    top_k: int | None = None  # null: the whole vocabulary; a truncated divergence is refused

    def __post_init__(self) -> None:
        check(0 <= self.beta <= 1, "distill.beta", self.beta, "between 0 and 1")
        check(self.reward_coef >= 0, "distill.reward_coef", self.reward_coef, "a number of at least 0")
        needs = (
            "null: without the other tokens, reverse KL has its minimum at q = p / e, and forward KL empties the tail; "
            "teacher and student are in one process, so the whole vocabulary costs no traffic"
        )
        check(self.top_k is None, "distill.top_k", self.top_k, needs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedOptions(RLOptions):
    """Options of tasks that compare the policy with a frozen model within their loss."""

    rl: PolicyGradientOptions = field(
        default_factory=lambda: PolicyGradientOptions(advantage="grpo", num_generations=2)
    )
    kl: KlOptions = field(default_factory=lambda: KlOptions(coef=0.0))

    def __post_init__(self) -> None:
        RLOptions.__post_init__(self)
        check(not self.rl.has_critic, "rl.advantage", self.rl.advantage, "grpo, dr_grpo, rloo or reinforce")
        check(self.kl.coef == 0, "kl.coef", self.kl.coef, f"0: the loss of {self.task} holds the policy itself")
        check(self.rl.echo_coef == 0, "rl.echo_coef", self.rl.echo_coef, f"0 with {self.task}")
        for name in ("context", "pipeline"):
            degree = getattr(self.parallel, name)
            check(degree == 1, f"parallel.{name}", degree, f"1: the loss of {self.task} reads whole rows and the head")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions(ComparedOptions):
    """All options of the task `distill`."""

    task: str = "distill"
    distill: DistillLossOptions = field(default_factory=DistillLossOptions)
    # The teacher: a run or folder with the policy's tokenizer. null: the role `teacher`, or for rows with a column
    # `teacher_prompt` the initial policy, which reads that prompt instead (self-distillation).
    teacher: str | None = None

    def __post_init__(self) -> None:
        ComparedOptions.__post_init__(self)
        is_used = self.distill.reward_coef > 0
        for name in ("whiten_advantages", "target_kl", "entropy_coef", "filter_zero_variance_groups"):
            value = getattr(self.rl, name)
            needs = f"{None if name == 'target_kl' else 'off'} without distill.reward_coef: it has no part in the loss"
            check(is_used or not value, f"rl.{name}", value, needs)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineDPOOptions(ComparedOptions):
    """All options of the task `online_dpo`."""

    task: str = "online_dpo"
    preference: PreferenceLossOptions = field(default_factory=PreferenceLossOptions)

    def __post_init__(self) -> None:
        ComparedOptions.__post_init__(self)
        check(self.preference.needs_reference, "preference.loss", self.preference.loss, "dpo or ipo")
        check(not self.kl.measure, "kl.measure", True, "false: the loss measures the reference")
        check(self.ptx.coef == 0, "ptx.coef", self.ptx.coef, "0: the loss is one of pairs")
        prompts, number = self.rl.prompts_per_rollout, self.rl.num_minibatches
        check(prompts % number == 0, "rl.num_minibatches", number, f"a divisor of {prompts} prompts")
