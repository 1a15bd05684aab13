"""On-policy distillation: the loss is that of every token of the policy's own completions, and of nothing else."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.nn import shared_prefix
from kitforge.data.tokenizers.loading import ByteTokenizer, find_tokenizer
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.types import MicroBatch
from kitforge.kits.rlhf.algorithms.losses import loss_denominator
from kitforge.kits.rlhf.reinforcement.distill import DistillTask
from kitforge.kits.rlhf.reinforcement.rollout_batch import loss_mask
from kitforge.trainer.run_folder import Run
from tests.kits.rlhf import runs
from tests.tokenizer_folders import write_kind

IDS = ByteTokenizer.vocab_size
CHATS = [{"prompt": [{"role": "user", "content": f"Q{n}?"}]} for n in range(8)]


def begin(choices: Mapping[str, Any] | None = None, folder: Path | None = None, **inputs: Any) -> Any:
    inputs = {"model": runs.network(torch.float64)} | inputs
    return runs.begin("distill", folder, {"data.eval_fraction": 0.0} | dict(choices or {}), **inputs)


def first(choices: Mapping[str, Any] | None = None, **inputs: Any) -> tuple[DistillTask, nn.Module, list[MicroBatch]]:
    """Task, network and the micro-batches of the first step, in float64."""
    return runs.opened(begin(choices, **inputs))


def teacher(seed: int = 4, padding: int = 0) -> nn.Module:
    return runs.network(torch.float64, seed=seed, padding=padding)


def plain(model: Any, other: Any, batch: MicroBatch, temperature: float, mode: str = "token-mean") -> Tensor:
    """The sum of KL(student || teacher) over the completions' tokens, by whole logits of whole rows."""
    mask = loss_mask(batch)
    q, p = ((each(batch["tokens"])[..., :IDS] / temperature).log_softmax(-1) for each in (model, other))
    losses = torch.where(mask, (q.exp() * (q - p)).sum(-1), 0.0)
    return (losses / mask.sum(-1, keepdim=True)).sum() if mode == "seq-mean-token-mean" else losses.sum()


def gradient(loss: Tensor, model: nn.Module) -> Tensor:
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_loss_is_the_divergence_at_every_token_of_the_completions(mode: str, temperature: float) -> None:
    other = teacher()
    choices = {"rollout.temperature": temperature, "rl.loss_aggregation": mode}
    task, model, (batch,) = first(choices, roles={"teacher": other})
    found, wanted = task.loss(model, batch)["loss"], plain(model, other, batch, temperature, mode)
    assert float((found - wanted).detach().abs()) < 1e-10
    assert float((gradient(found, model) - gradient(wanted, model)).abs().max()) < 1e-10
    assert float(task.count([batch])["loss"]) == float(loss_denominator(loss_mask(batch), mode, 0))  # type: ignore[arg-type]
    assert not any(each.grad is not None for each in other.parameters())


def test_a_teacher_that_is_the_student_teaches_nothing_and_one_of_permuted_outputs_does() -> None:
    # A shift by one token between the two (WrinkleFree #13, atropos #464) would be seen here.
    rows = [{"prompt": row["prompt"], "teacher_prompt": row["prompt"]} for row in runs.PROMPTS]
    for temperature in (0.7, 1.0):
        task, model, (batch,) = first({"rollout.temperature": temperature}, roles={}, train_dataset=rows)
        loss = task.loss(model, batch)["loss"]
        assert float(loss.detach().abs()) < 1e-12
        assert float(gradient(loss, model).abs().max()) < 1e-12
    other = runs.network(torch.float64)
    cast(Any, other).output.data = cast(Any, other).output.data.roll(1, 0)
    task, model, (batch,) = first(roles={"teacher": other})
    assert float(task.loss(model, batch)["loss"].detach()) > 1.0


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_denominator_counts_the_generated_tokens_of_all_micro_batches(size: int) -> None:
    # TRL counted labels of the dataset, of which prompts have none (#6478), and before by micro-batch (#6006).
    task, model, step = first({"trainer.micro_batch_size": size})
    assert len(step) == -(-16 // size)
    assert float(task.count(step)["loss"]) == sum(len(each.logprobs) for each in runs.collected(task))
    wanted = runs.gradient(begin({"trainer.micro_batch_size": 16}))
    found = runs.gradient(begin({"trainer.micro_batch_size": size}))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-12


@pytest.mark.parametrize("choices", [{}, {"distill.reward_coef": 0.5}])
def test_a_prompt_that_is_computed_once_changes_nothing(
    choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = {"teacher": teacher(), "reward": runs.letters}
    shared = runs.gradient(begin(choices, roles=roles))
    monkeypatch.setattr(shared_prefix, "SHARED", 0.0)
    alone = runs.gradient(begin(choices, roles=roles))
    assert float((shared - alone).norm() / alone.norm()) < 1e-10


def test_vocabularies_that_are_padded_differently_share_the_tokenizers_ids() -> None:
    # Qwen2.5 has 151,936 and 152,064 rows for one tokenizer: LMOps #286, torchtune #2119.
    model, other = runs.network(torch.float64, padding=5), teacher(padding=2)
    cast(Any, model).output.data[IDS:] = 9.0
    cast(Any, other).output.data[IDS:] = -torch.inf
    cast(Any, other).output.data[:, 1:] = cast(Any, other).output.data[:, 1:].nan_to_num(neginf=0.0)
    task, trained, (batch,) = first(model=model, roles={"teacher": other, "reward": runs.letters})
    assert int(batch["tokens"].max()) < IDS
    loss = task.loss(trained, batch)["loss"]
    assert float((loss - plain(trained, other, batch, 1.0)).detach().abs()) < 1e-10
    assert bool(torch.isfinite(gradient(loss, trained)).all())
    # The ratio of the policy gradient is 1 too: the sampler's log-probs are over the same ids.
    task, trained, (batch,) = first(
        {"distill.reward_coef": 1.0}, model=model, roles={"teacher": other, "reward": runs.letters}
    )
    assert float(task.loss(trained, batch)["approx_kl"].abs()) < 1e-10


def test_a_reward_adds_its_policy_gradient() -> None:
    roles = {"teacher": teacher(), "reward": runs.letters}
    task, model, (batch,) = first({"distill.reward_coef": 0.3}, roles=roles)
    alone, _, _ = first(roles=roles)
    shaped = {"rl.loss_aggregation": "token-mean", "kl.coef": 0.0, "data.eval_fraction": 0.0}
    other = runs.begin("grpo", None, shaped, model=runs.network(torch.float64)).loop.task
    whole = gradient(task.loss(model, batch)["loss"], model)
    parts = gradient(alone.loss(model, batch)["loss"], model), gradient(other.loss(model, batch)["loss"], model)
    assert float((whole - parts[0] - 0.3 * parts[1]).abs().max()) < 1e-10
    assert float(parts[1].abs().max()) > 1e-3
    assert {"policy_loss", "approx_kl"} <= task.loss(model, batch).keys()
    assert {"reward", "reward_std"} <= batch["metrics"].keys()


def test_without_a_reward_none_is_logged() -> None:
    _, _, (batch,) = first()
    assert not [name for name in batch["metrics"] if "reward" in name]


def test_truncated_completions_count_unless_that_is_asked_and_long_ones_are_seen_by_part() -> None:
    choices = {"rollout.max_new_tokens": 20, "data.sequence_length": 64}
    task, model, (batch,) = first(choices)
    assert batch["metrics"]["completion/clipped_ratio"] > 0.5
    assert bool(loss_mask(batch).any(-1).all())
    sums, counts = task.loss(model, batch), task.count([batch])
    lengths = loss_mask(batch).sum(-1)
    assert float(counts["distill/reverse_kl/from_17"]) == float((lengths - 16).clamp(min=0).sum())
    parts = [each for name, each in sums.items() if name.startswith("distill/reverse_kl/from")]
    assert float(torch.stack(parts).sum()) == pytest.approx(float(sums["distill/reverse_kl"]))
    task, _, (batch,) = first(choices | {"rl.mask_truncated_completions": True})
    assert float(loss_mask(batch).any(-1).float().mean()) == pytest.approx(
        1 - batch["metrics"]["completion/clipped_ratio"]
    )


def test_a_step_of_which_nothing_counts_is_skipped_and_not_a_success(tmp_path: Path) -> None:
    # TRL #6668: a loss of 0 with everything masked.
    choices = {"rl.mask_truncated_completions": True, "trainer.max_steps": 2, "rollout.max_new_tokens": 1}
    assembly = begin(choices, tmp_path / "run", model=runs.network())
    lines = _lines(assembly)
    assert all("loss" not in each for each in lines)
    assert lines[-1]["skipped"] == 2


def _lines(assembly: Any) -> list[dict[str, Any]]:
    runs.finish(assembly)
    found = [json.loads(line) for line in (assembly.folder / "metrics.jsonl").read_text().splitlines()]
    return [each for each in found if each["kind"] == "train"]


def test_the_teacher_has_no_dropout() -> None:
    (one, model, (batch,)), (other, _, _) = (
        first(roles={"teacher": runs.Noisy(teacher())}),
        first(roles={"teacher": teacher()}),
    )
    assert float(one.loss(model, batch)["loss"].detach()) == pytest.approx(
        float(other.loss(model, batch)["loss"].detach())
    )


def test_a_teacher_may_read_another_prompt_before_the_same_completions() -> None:
    rows = [{"prompt": f"Q{n}: ", "teacher_prompt": f"Hint {n}. Q{n}: "} for n in range(6)]
    task, model, step = first({"trainer.micro_batch_size": 3}, roles={}, train_dataset=rows)
    prompts = {row["prompt"]: row["teacher_prompt"] for row in rows}
    tokenizer, wanted = ByteTokenizer(), torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for rollout in runs.collected(task):
            prompt, said = rollout.completion.prompt, list(rollout.completion.tokens)
            hinted = tokenizer.encode(prompts[tokenizer.decode(prompt)])
            q, p = (
                cast(Any, model)(torch.tensor([[*before, *said]]))[0, len(before) - 1 : -1].log_softmax(-1)
                for before in (list(prompt), list(hinted))
            )
            wanted = wanted + (q.exp() * (q - p)).sum()
        found = torch.stack([task.loss(model, each)["loss"] for each in step]).sum()
    assert float((found - wanted).detach().abs()) < 1e-10
    assert float(wanted) > 1e-3


def test_prompts_of_the_teacher_that_cannot_be_are_refused() -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"Q{n}: ", "teacher_prompt": f"Hint. Q{n}: "} for n in range(6)]
    for changed, match in (
        ([*rows[:3], {"prompt": "Q"}], "no prompt for some rows"),
        ([*rows, rows[0] | {"teacher_prompt": "Other"}], "the same prompt"),
        ([rows[0] | {"teacher_prompt": "long " * 60}], "too long"),
        ([{"prompt": "Q", "teacher_prompt": [{"role": "user", "content": "Q"}]}], "changes the completion"),
        ([CHATS[0] | {"teacher_prompt": [*CHATS[0]["prompt"], {"role": "assistant", "content": "A"}]}], "changes"),
    ):
        with pytest.raises(DataError, match=match):
            first(roles={}, train_dataset=changed)


def test_a_role_that_is_given_is_in_the_metrics_and_one_without_an_effect_is_refused(tmp_path: Path) -> None:
    # Numbers of a teacher that a trainer dropped: atropos #456.
    choices = {"trainer.max_steps": 1, "rollout.keep_rollout_files": 2}
    (line,) = _lines(begin(choices, tmp_path / "run", roles={"teacher": teacher(), "reward": runs.letters}))
    assert {"distill/reverse_kl", "distill/forward_kl", "distill/agreement", "entropy", "reward"} <= line.keys()
    assert 0 <= line["distill/agreement"] <= 1
    for named, fix in ((None, "no teacher"), (str(tmp_path / "run"), "no effect")):
        with pytest.raises(ConfigError, match=fix):
            begin({"teacher": named, "checkpoint": str(tmp_path / "run")}, roles={}, model=None)


def test_a_single_completion_of_a_prompt_is_learned_without_a_group(tmp_path: Path) -> None:
    alone = {"rl.num_generations": 1, "trainer.max_steps": 1}
    with pytest.raises(ConfigError, match="or add rl.advantage=reinforce"):
        begin(alone)
    (line,) = _lines(begin(alone | {"rl.advantage": "reinforce"}, tmp_path / "run"))
    assert line["distill/reverse_kl"] > 0


class OtherTokenizer(ByteTokenizer):
    fingerprint = "other"


def test_a_teacher_of_another_tokenizer_or_of_another_chat_template_is_refused(tmp_path: Path) -> None:
    other = Run(folder=Path("nowhere"), model=teacher(), processor=OtherTokenizer(), metrics={})
    with pytest.raises(ConfigError, match="another tokenizer"):
        begin(roles={"teacher": other})
    folder = write_kind("qwen", tmp_path / "student")
    student = find_tokenizer(folder)
    write_kind("qwen", tmp_path / "teacher")
    config = json.loads((tmp_path / "teacher" / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    (tmp_path / "teacher" / "tokenizer_config.json").write_text(json.dumps(config))
    given = Run(folder=folder, model=teacher(), processor=find_tokenizer(tmp_path / "teacher"), metrics={})
    with pytest.raises(ConfigError, match="another chat template"):
        begin(roles={"teacher": given}, processor=student)


def test_a_run_does_not_go_on_with_another_teacher() -> None:
    task, other = (first(roles={"teacher": teacher(seed)})[0] for seed in (4, 5))
    task.load_state(task.state())
    with pytest.raises(ConfigError, match="reference model changed"):
        other.load_state(task.state())


def test_an_evaluation_measures_the_divergence_on_its_own_completions() -> None:
    found = runs.begin("distill", None, {}, model=runs.network(torch.float64)).loop.evaluate()
    one = runs.begin(
        "distill", None, {"trainer.micro_batch_size": 1}, model=runs.network(torch.float64)
    ).loop.evaluate()
    assert {"eval/distill/loss", "eval/distill/reverse_kl", "eval/entropy"} <= found.keys()
    assert found == pytest.approx(one)
    assert "eval/reward" not in found
