"""Rounds of policy optimisation once more, from the papers: answer by answer, token by token, with an Adam of its own.

Only tokens, and whether an answer ended, are taken from the run; log-probabilities, values, scores, advantages, losses
and weights are found anew. Float64 throughout.
"""

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace as Answer
from typing import Any

import torch
from torch import Tensor

from kitforge.data.schedule import shuffled_indices
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation import seed as seeds
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout
from kitforge.kits.rlhf.roles.value_head import critic_of, policy_of

Score = Callable[[tuple[int, ...]], float | list[float]]


class PlainAdam:
    """Adam (Kingma and Ba, 2015), without decay."""

    def __init__(self, parameters: Sequence[Tensor], options: Any) -> None:
        self.parameters, self.options, self.times = list(parameters), options, [0] * len(parameters)
        self.moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in self.parameters]

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        (one, two), rate, eps = self.options.betas, self.options.learning_rate, self.options.eps
        for number, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if gradient is None:
                continue
            self.times[number] = time = self.times[number] + 1
            mean, square = self.moments[number]
            mean, square = one * mean + (1 - one) * gradient, two * square + (1 - two) * gradient**2
            self.moments[number] = mean, square
            mean, square = mean / (1 - one**time), square / (1 - two**time)
            parameter.data -= rate * mean / (square.sqrt() + eps)


class PlainRun:
    """The networks of a run before its first step, and what becomes of them."""

    def __init__(self, assembly: Any, score: Score, texts: Sequence[tuple[str, str]] = ()) -> None:
        self.options, self.score, self.texts = assembly.options, score, texts
        model = copy.deepcopy(assembly.loop.model)
        self.policy, self.critic = policy_of(model), critic_of(model)
        self.reference = copy.deepcopy(self.policy)
        self.before: list[Any] = []  # the policy at the beginning of each round
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.adam = PlainAdam(self.parameters, self.options.optimizer)
        self.beta = self.options.kl.coef
        self.lines: list[dict[str, float]] = []

    def log_probs(self, network: Any, answer: Answer) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at each token of the answer."""
        logits = network(torch.tensor([answer.text]))[0, answer.start - 1 : -1] / self.options.rollout.temperature
        every = logits.log_softmax(-1)
        chosen = every.gather(-1, torch.tensor(answer.text[answer.start :]).unsqueeze(-1)).squeeze(-1)
        return chosen, -(every.exp() * every).sum(-1)

    def values(self, answer: Answer) -> Tensor:
        assert self.critic is not None
        found: Tensor = self.critic(torch.tensor([answer.text]))[0, answer.start - 1 : -1]
        return found

    @torch.no_grad()
    def look(self, each: Rollout, number: int) -> Answer:
        """All that is known of an answer before the first update of a round."""
        o = self.options
        text = [*each.completion.prompt, *each.completion.tokens]
        ended = each.completion.tokens[-1] == ByteTokenizer.eos_id
        assert ended == each.completion.is_finished
        answer = Answer(text=text, start=len(each.completion.prompt), ended=ended, prompt=each.prompt_index)
        answer.size = len(text) - answer.start
        drawn_by = self.before[max(0, number - o.rollout.max_staleness)]
        answer.drawn, own = self.log_probs(drawn_by, answer)[0], self.log_probs(self.policy, answer)[0]
        answer.old = own if o.rl.old_logprobs == "recompute" else answer.drawn
        difference = answer.old - self.log_probs(self.reference, answer)[0]
        answer.reference = answer.old - difference
        answer.kl = {"k1": difference, "k2": difference**2 / 2, "k3": (-difference).exp() - 1 + difference}[
            o.kl.estimator
        ]
        answer.value = torch.zeros(answer.size) if self.critic is None else self.values(answer)
        answer.raw = self.score(each.completion.tokens[: answer.size - ended])
        answer.weight = self.correction(answer)
        return answer

    def correction(self, answer: Answer) -> Tensor:
        o, ratio = self.options.importance_sampling, (answer.old - answer.drawn).exp()
        if o.level != "token":
            product = math.prod(ratio.tolist())
            ratio = torch.full_like(ratio, product if o.level == "sequence" else product ** (1 / answer.size))
        if o.mode == "none":
            return torch.ones_like(ratio)
        if o.mode == "truncate":
            return torch.tensor([min(max(each, o.min), o.max) for each in ratio.tolist()])
        return torch.tensor([each if o.min <= each <= o.max else 0.0 for each in ratio.tolist()])

    def reward(self, answer: Answer) -> None:
        """The rewards of the tokens: score, penalties, and the distance from the reference where it is paid in them."""
        o = self.options
        scores = answer.raw if isinstance(answer.raw, list) else [0.0] * (answer.size - 1) + [answer.raw]
        scores = scores + [0.0] * (answer.size - len(scores))
        answer.before_penalties = sum(scores)
        if not answer.ended:
            scores[-1] -= o.rl.missing_eos_penalty
        if o.rl.overlong_buffer:
            beyond = answer.size - (o.rollout.max_new_tokens - o.rl.overlong_buffer)
            scores[-1] -= max(beyond, 0) / o.rl.overlong_buffer
        answer.total = sum(scores)
        pays = o.kl.apply_to == "reward"
        answer.rewards = torch.tensor(scores) - (self.beta * answer.kl if pays else 0.0)

    def judge(self, answers: list[Answer]) -> list[Answer]:
        """Advantages and targets; returns the answers that are trained on."""
        o = self.options.rl
        for answer in answers:
            self.reward(answer)
            answer.kept = answer.ended or not o.mask_truncated_completions
        if o.advantage in ("gae", "reinforce"):
            self.advantages_of_tokens(answers)
        else:
            self.advantages_of_groups(answers)
        kept = [each for each in answers if each.kept]
        if o.whiten_advantages and kept:
            every = torch.cat([each.advantages for each in kept])
            for each in answers:
                each.advantages = (each.advantages - every.mean()) / (every.var() + 1e-8).sqrt()
        return kept

    def advantages_of_tokens(self, answers: list[Answer]) -> None:
        o = self.options.rl
        for each in answers:
            trace = o.gae_lambda if o.advantage == "gae" else 1.0
            each.advantages = self.gae(each, trace)
            each.target = each.advantages + each.value

    def gae(self, answer: Answer, trace: float) -> Tensor:
        found, advantage, following = [0.0] * answer.size, 0.0, 0.0
        for place in reversed(range(answer.size)):
            value = float(answer.value[place])
            error = float(answer.rewards[place]) + self.options.rl.gamma * following - value
            advantage = error + self.options.rl.gamma * trace * advantage
            found[place], following = advantage, value
        return torch.tensor(found)

    def advantages_of_groups(self, answers: list[Answer]) -> None:
        o = self.options.rl
        groups: dict[int, list[Answer]] = {}
        for each in answers:
            groups.setdefault(each.prompt, []).append(each)
        for group in groups.values():
            scores = [float(each.rewards.sum()) for each in group]
            for place, each in enumerate(group):
                others = scores[:place] + scores[place + 1 :]
                gain = scores[place] - statistics.fmean(others if o.advantage == "rloo" else scores)
                if o.advantage == "grpo":
                    gain /= statistics.stdev(scores) + 1e-6
                each.advantages = torch.full((each.size,), gain)
            if o.filter_zero_variance_groups and len({each.before_penalties for each in group}) == 1:
                for each in group:
                    each.kept = False

    def token_losses(self, answer: Answer, log_probs: Tensor, entropies: Tensor) -> tuple[Tensor, int]:
        o, clip, gain = self.options, self.options.rl.clip, answer.advantages
        moved = log_probs - answer.old
        ratio = (moved.mean().expand_as(moved) if o.rl.loss_mode == "gspo" else moved).exp()
        held = ratio.clamp(1 - clip.low, 1 + clip.high)
        if o.rl.loss_mode == "cispo":
            losses, num_clipped = -held.detach() * gain * log_probs, int((held != ratio).sum())
        else:
            surrogate = torch.minimum(ratio * gain, held * gain)
            is_clipped = held * gain < ratio * gain
            if clip.dual is not None:
                bound = clip.dual * gain
                is_clipped = is_clipped | ((gain < 0) & (surrogate < bound))
                surrogate = torch.where(gain < 0, torch.maximum(surrogate, bound), surrogate)
            losses, num_clipped = -surrogate, int(is_clipped.sum())
        losses = losses * answer.weight
        if o.kl.apply_to == "loss" and self.beta:
            away = log_probs - answer.reference
            estimate = {"k1": away, "k2": away**2 / 2, "k3": (-away).exp() - 1 + away}[o.kl.estimator]
            if o.kl.use_bias_correction:
                drawn = moved.exp()
                estimate = (drawn.detach() if o.kl.estimator == "k2" else drawn) * estimate
            losses = losses + self.beta * estimate
        return losses - o.rl.entropy_coef * entropies, num_clipped

    def token_weight(self, answer: Answer, part: list[Answer]) -> float:
        return {
            "token-mean": 1 / sum(each.size for each in part),
            "seq-mean-token-mean": 1 / (answer.size * len(part)),
            "seq-mean-token-sum": 1 / len(part),
            "constant": 1 / (self.options.rollout.max_new_tokens * len(part)),
        }[self.options.rl.loss_aggregation]

    def update(self, part: list[Answer], number: int, figures: dict[str, float]) -> None:
        o, num_tokens, line = self.options, sum(each.size for each in part), dict(figures)
        if not part:
            self.lines.append(line)
            return
        policy = value = torch.zeros(())
        entropy = far = clipped = 0.0
        for each in part:
            log_probs, entropies = self.log_probs(self.policy, each)
            losses, num_clipped = self.token_losses(each, log_probs, entropies)
            policy = policy + losses.sum() * self.token_weight(each, part)
            moved = (log_probs - each.old).detach()
            far += float((moved.exp() - 1 - moved).sum())
            entropy, clipped = entropy + entropies.sum().item(), clipped + num_clipped
            if self.critic is not None:
                value = value + self.value_errors(each).sum() / num_tokens
        line |= {"policy_loss": policy.item(), "entropy": entropy / num_tokens}
        line["approx_kl"] = far / num_tokens
        # The advantages of equal scores are zero but for the rounding, whose sign decides what counts as clipped.
        if not any(((each.advantages.abs() < 1e-9) & (each.advantages != 0)).any() for each in part):
            line["clip_fraction"] = clipped / num_tokens
        total = policy * (0.0 if number < o.rl.critic_warmup else 1.0)
        if self.critic is not None:
            line["value_loss"] = value.item()
            total = total + o.rl.vf_coef * value
        if self.texts:
            texts = self.text_loss(len(self.lines))
            line["ptx_loss"] = texts.item()
            total = total + (0.0 if number < o.rl.critic_warmup else o.ptx.coef) * texts
        gradients = torch.autograd.grad(total, self.parameters, allow_unused=True)
        line["loss"] = total.item()
        line["grad_norm"] = math.sqrt(sum(float((each**2).sum()) for each in gradients if each is not None))
        self.lines.append(line)
        # While the critic warms up nobody updates the policy.
        critic = {id(each) for each in self.critic.parameters()} if self.critic is not None else set()
        warms_up = number < o.rl.critic_warmup
        members = zip(self.parameters, gradients, strict=True)
        self.adam.step([each if not warms_up or id(own) in critic else None for own, each in members])

    def value_errors(self, answer: Answer) -> Tensor:
        values, clip = self.values(answer), self.options.rl.value_clip_range
        errors = (values - answer.target) ** 2
        if clip is not None:
            held = torch.minimum(torch.maximum(values, answer.value - clip), answer.value + clip)
            errors = torch.maximum(errors, (held - answer.target) ** 2)
        return errors / 2

    def text_loss(self, update: int) -> Tensor:
        """The mean loss a token of the rows beside an update."""
        size = self.options.ptx.batch_size
        rows = shuffled_indices(self.options.seed, len(self.texts), update * size, size, shuffle=True)
        losses = []
        for prompt, completion in (self.texts[row] for row in rows):
            text = [*prompt.encode(), *completion.encode(), ByteTokenizer.eos_id]
            answer = Answer(text=text, start=len(prompt.encode()))
            every = self.policy(torch.tensor([text]))[0, answer.start - 1 : -1].log_softmax(-1)
            losses.append(-every.gather(-1, torch.tensor(text[answer.start :]).unsqueeze(-1)))
        return torch.cat(losses).mean()

    def round(self, trajectories: Sequence[Rollout], number: int, num_updates: int) -> None:
        """At most so many updates on the answers of a round."""
        o, rl = self.options, self.options.rl
        self.before.append(copy.deepcopy(self.policy))
        answers = [self.look(each, number) for each in trajectories]
        self.judge(answers)
        kl = statistics.fmean(float(each.kl.sum()) for each in answers)
        figures = {
            "reward": statistics.fmean(each.reward for each in trajectories),
            "kl": kl,
            "completion/mean_length": statistics.fmean(each.size for each in answers),
            "completion/eos_rate": statistics.fmean(each.ended for each in answers),
            "kl_coef": self.beta,
        }
        if self.critic is not None:
            every = [torch.cat([getattr(each, name) for each in answers]) for name in ("target", "value")]
            figures["explained_variance"] = float(1 - (every[0] - every[1]).var() / every[0].var())
        for update in range(num_updates):
            epoch, part = divmod(update, rl.num_minibatches)
            size = len(answers) // rl.num_minibatches
            noise = seeds.generator(o.seed, "minibatch", number, epoch)
            rows = torch.randperm(len(answers), generator=noise)[part * size : (part + 1) * size]
            self.update([answers[row] for row in rows.tolist() if answers[row].kept], number, figures)
        if o.kl.controller == "adaptive":
            error = min(max(kl / o.kl.target - 1, -0.2), 0.2)
            self.beta *= max(0.0, 1 + error * len(answers) / o.kl.horizon)
