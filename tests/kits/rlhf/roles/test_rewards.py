"""What gives rewards, and what is said when it gives none."""

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kitforge.data.chat.datasets import ChatDatasetReader
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, DataError, TrainingError
from kitforge.kits.rlhf import batching
from kitforge.kits.rlhf.roles.prompt_completion import PromptCompletion
from kitforge.kits.rlhf.roles.rewards import (
    WeightedScorer,
    exact_match,
    gsm8k_match,
    lowercase_fraction,
    reward_members,
    reward_reference,
    scorer_of,
)
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from kitforge.trainer.run_folder import Run
from tests.kits.rlhf import runs

TOKENIZER = ByteTokenizer()


def answer(asked: str, text: str, *, has_ended: bool = True, **columns: Any) -> PromptCompletion:
    end = [TOKENIZER.eos_id] if has_ended else []
    tokens = (*TOKENIZER.encode(text), *end)
    return PromptCompletion(
        prompt=tuple(TOKENIZER.encode(asked)), tokens=tokens, is_finished=has_ended, columns=columns
    )


ANSWERS = [answer("a", "xyz", answer="xyz", level=1), answer("b", "x", has_ended=False, answer="y", level=2)]


def scores(given: Any, answers: Sequence[PromptCompletion] = tuple(ANSWERS)) -> list[float | list[float] | None]:
    return [each.score for each in scorer_of(given, TOKENIZER).checked_rewards(answers)]


def test_a_function_sees_texts_tokens_and_columns_and_only_what_it_names() -> None:
    def everything(**seen: Any) -> list[float]:
        assert seen["prompts"] == ["a", "b"]
        assert seen["completions"] == ["xyz", "x"]
        assert seen["completion_tokens"] == [[120, 121, 122], [120]]
        assert seen["level"] == [1, 2]
        return [1, 2]

    assert scores(everything) == [1.0, 2.0]
    assert scores(lambda *, level: level) == [1.0, 2.0]


async def later(*, completions: list[str]) -> list[dict[str, float]]:
    await asyncio.sleep(0)
    return [{"score": len(text)} for text in completions]


def test_an_async_function_a_mapping_and_tensors_serve_as_well() -> None:
    assert scores(later) == [3.0, 1.0]
    assert scores(lambda *, completions: torch.tensor([0.5, 1.5])) == [0.5, 1.5]


def test_arrays_of_numpy_serve_as_lists_do() -> None:
    assert scores(lambda *, completions: np.array([0.5, 1.5], dtype=np.float32)) == [0.5, 1.5]
    assert scores(lambda *, completions: [np.float32(0.5), np.array(2)]) == [0.5, 2.0]
    assert scores(lambda *, completions: [np.ones(3), torch.ones(1)]) == [[1.0, 1.0, 1.0, 0.0], [1.0]]
    assert scores(lambda *, completions: map(len, completions)) == [3.0, 1.0]
    assert scores(lambda *, completions: 0.5, ANSWERS[:1]) == [0.5]


def test_an_async_function_serves_within_a_loop_that_runs_as_in_a_notebook() -> None:
    async def cell() -> list[float | list[float]]:
        return scores(later)

    assert asyncio.run(cell()) == [3.0, 1.0]


def test_a_reward_that_does_not_apply_is_left_out_of_the_sum_and_of_its_own_scores() -> None:
    def first_only(*, completions: list[str]) -> list[float | None]:
        return [5.0, None]

    scorer = scorer_of([first_only, "exact"], TOKENIZER)
    assert isinstance(scorer, WeightedScorer)
    found = [dict(each.rewards) for each in scorer.checked_rewards(ANSWERS)]
    assert found == [{"first_only": 5.0, "exact": 1.0}, {"exact": 0.0}]
    assert scores([first_only, "exact"]) == [6.0, 0.0]
    for given in (first_only, [first_only], {"first": (0.5, first_only)}):
        with pytest.raises(TrainingError, match=r"(?s)no reward applies.*None for 1 of 2"):
            scores(given)


def test_a_function_is_found_by_its_path_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards_of_test.py").write_text(
        "def size(*, completions):\n    return list(map(len, completions))\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert scores("own_rewards_of_test:size") == [3.0, 1.0]
    assert scores(["own_rewards_of_test:size", "exact"]) == [4.0, 1.0]
    assert scores("kitforge.kits.rlhf.roles.rewards:lowercase_fraction") == [1.0, 1.0]
    assert sys.path == before
    for wrong in ("own_rewards_of_test:length", "no_such_module_of_test:size"):
        with pytest.raises(ConfigError, match=rf"(?s)no function or class '{wrong}'.*Error.*current folder"):
            scores(wrong)


def test_a_reward_is_recorded_by_what_names_it() -> None:
    run = Run(folder=Path("runs/judge"), model=ValueHeadModel(runs.network()), processor=TOKENIZER, metrics={})
    assert reward_reference(run) == "runs/judge"
    assert reward_reference(lowercase_fraction) == "kitforge.kits.rlhf.roles.rewards:lowercase_fraction"
    assert reward_reference([(0.5, lowercase_fraction), "exact"]) == {
        "lowercase_fraction": [0.5, "kitforge.kits.rlhf.roles.rewards:lowercase_fraction"],
        "exact": [1.0, "exact"],
    }
    assert reward_reference(lambda *, completions: [0.0]) is None
    assert reward_reference({"exact": "exact", "own": lambda *, completions: [0.0]}) is None


class Backwards(ByteTokenizer):
    """The bytes in their reverse order, with the end before them all."""

    fingerprint = "backwards"

    def encode(self, text: str) -> list[int]:
        return [255 - byte for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(255 - token for token in ids if token < 256).decode("utf-8", "replace")


def test_a_reward_model_with_a_tokenizer_of_its_own_reads_the_text() -> None:
    model, own = ValueHeadModel(runs.network(torch.float64)), Backwards()
    model.reset_head(1)
    run = Run(folder=Path(), model=model, processor=own, metrics={})

    def wanted(row: dict[str, Any]) -> float:
        with torch.no_grad():
            (response,) = ChatDatasetReader(own, template_of(own)).demonstrations([row])
            return float(model(torch.tensor([response.tokens]))[0, -1])

    said = [{"role": "user", "content": "How?"}]
    asked = [*ANSWERS[:1], answer("a", "xyz", prompt="a"), answer("How?", "So", prompt=said)]
    found = scores({"judge": run}, asked)
    first = wanted({"prompt": "a", "completion": "xyz"})
    reply = wanted({"messages": [*said, {"role": "assistant", "content": "So"}]})
    assert found == pytest.approx([first, first, reply], abs=1e-9)
    # An answer that was cut off has no end to be read.
    text = [*own.encode("b"), *own.encode("x")]
    with torch.no_grad():
        cut = float(model(torch.tensor([text]))[0, -1])
    assert scores(run, ANSWERS[1:]) == pytest.approx([cut], abs=1e-9)
    assert scores(Run(folder=Path(), model=model, processor=TOKENIZER, metrics={})) == scores(model)
    assert scores(run, [answer("a", "", prompt=said)])


def test_scores_of_tokens_leave_the_end_without_one() -> None:
    assert scores(lambda *, completions: [[1, 2, 3], [4]]) == [[1.0, 2.0, 3.0, 0.0], [4.0]]


@torch.no_grad()
def test_a_model_scores_answers_in_their_order_whatever_their_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "CPU_TOKENS", 30)
    judge = ValueHeadModel(runs.network(torch.float64))
    judge.reset_head(0)
    answers = [answer("a" * size, "b") for size in (3, 9, 1, 14, 9, 2, 5)]
    wanted = [float(judge(torch.tensor([[*each.prompt, *each.tokens]]))[0, -1]) for each in answers]
    assert scores(judge, answers) == pytest.approx(wanted, abs=1e-12)


def test_rows_that_share_a_pass_are_of_similar_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "CPU_TOKENS", 1024)
    lengths = [600, 20, 500, 30, 610, 480, 25, *[10] * 70]
    parts = batching.forward_batches(lengths, None, torch.device("cpu"))
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    assert [[lengths[place] for place in part] for part in parts] == [
        [610],
        [600],
        [500, 480],
        [30, 25, 20] + [10] * 31,
        [10] * 39,
    ]
    on_accelerator = batching.forward_batches(lengths, None, torch.device("meta"))
    assert [len(part) for part in on_accelerator] == [53, 24]
    for device in ("cpu", "meta"):
        bounded = batching.forward_batches(lengths, 640, torch.device(device))
        assert [len(part) for part in bounded] == [1, 1, 1, 1, 21, 52]


def test_a_column_that_the_prompts_do_not_have_is_named() -> None:
    with pytest.raises(DataError, match=r"(?s)needs a column.*columns answer, level.*data\.columns\.levels=NAME"):
        scores(lambda *, levels, further=None, **columns: [0.0, 0.0])


def test_what_a_mapping_says_beside_its_score_is_kept_by_name() -> None:
    def judge(*, completions: list[str]) -> list[dict[str, Any]]:
        return [{"score": 2.0, "acc": True, "depth": None}, {"score": 1.0, "acc": False, "depth": 3}]

    alone, several = (scorer_of(each, TOKENIZER).checked_rewards(ANSWERS) for each in (judge, {"judge": (0.5, judge)}))
    assert [each.score for each in alone] == [2.0, 1.0]
    assert [each.rewards for each in alone] == [{"acc": 1.0}, {"acc": 0.0, "depth": 3.0}]
    assert [each.score for each in several] == [1.0, 0.5]
    assert several[1].rewards == {"judge": 1.0, "judge/acc": 0.0, "judge/depth": 3.0}


WRONG = {
    "it says more than numbers": (lambda *, completions: [{"score": 1.0, "why": "so"}, 0.0], "cannot be logged"),
    "it raises": (lambda *, completions: 1 / 0, "failed"),
    "it gives NaN": (lambda *, completions: [float("nan"), 0.0], "invalid reward"),
    "it gives one number for all": (lambda *, completions: 1.0, r"(?s)wrong number.*got: *float 1.0.*a list of 2"),
    "it gives text": (lambda *, completions: ["1.0", 0.0], "invalid reward"),
    "it gives a mapping without a score": (lambda *, completions: [{"reward": 1.0}, 0.0], "invalid reward"),
    "it gives too few": (lambda *, completions: [1.0], "wrong number of rewards"),
    "it gives a token too few": (lambda *, completions: [[1.0], [1.0]], "wrong number of token rewards"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_fails_is_named(name: str) -> None:
    function, words = WRONG[name]
    with pytest.raises(TrainingError, match=words) as error:
        scores(function)
    assert "lambda" in str(error.value)


def test_several_are_added_up_by_weight() -> None:
    def length(*, completions: list[str]) -> list[int]:
        return [len(text) for text in completions]

    assert scores({"length": (0.1, length), "exact": "exact"}) == pytest.approx([1.3, 0.1])
    assert scores({"length": length, "exact": (-2, "exact")}) == pytest.approx([1.0, 1.0])
    model = ValueHeadModel(runs.network())
    run = Run(folder=Path(), model=model, processor=TOKENIZER, metrics={})
    assert scores({"model": run, "length": (0.0, length)}) == pytest.approx(scores(model))
    for wrong in ((length, 0.1), (float("nan"), length), (0.1,)):
        with pytest.raises(ConfigError, match=r"the role reward, length.*\n.*got:.*\n.*expected: a weight and"):
            scores({"length": wrong})


def test_checks_against_known_answers() -> None:
    assert exact_match(completions=[" 7 ", "8"], answer=["7", 7]) == [1.0, 0.0]
    known = ["so 3+4 = 7\n#### 7", "#### 1,234", "#### -0.5"]
    assert gsm8k_match(completions=["first 3, then 7.", "1234", "it is 0.5"], answer=known) == [1.0, 1.0, 0.0]
    with pytest.raises(DataError, match="no number"):
        gsm8k_match(completions=["7"], answer=["seven"])


@pytest.mark.parametrize(
    "known",
    [
        ["3", "4"],
        ("3", 4),
        np.array(["3", "4"]),
        np.array([3, 4]),
        torch.tensor([3, 4]),
        {"style": "rule", "ground_truth": "4", "index": 5},
        {"ground_truth": {"target": ["3", "#### 4"]}},
        np.array(4),
        {"ground_truth": np.array(["3", "4"], dtype=object)},
    ],
    ids=repr,
)
def test_any_of_several_answers_is_right(known: Any) -> None:
    assert gsm8k_match(completions=["It is 4.", "It is 5."], answer=[known, known]) == [1.0, 0.0]
    if "####" not in repr(known):
        assert exact_match(completions=[" 4", "5"], answer=[known, known]) == [1.0, 0.0]


@pytest.mark.parametrize("known", [[], {"style": "rule"}, {"ground_truth": []}], ids=repr)
def test_a_cell_that_says_nowhere_what_is_right_is_refused(known: Any) -> None:
    for reward in (exact_match, gsm8k_match):
        with pytest.raises(DataError, match="answer.*\n.*got.*\n.*ground_truth"):
            reward(completions=["4"], answer=[known])


def test_the_toy_counts_lower_case_letters() -> None:
    assert scores("lowercase") == [1.0, 1.0]
    assert lowercase_fraction(completions=["aB1z", ""]) == [0.5, 0.0]


def test_a_reward_model_scores_what_was_generated_token_by_token() -> None:
    model = ValueHeadModel(runs.network())
    model.reset_head(1)
    model.mean.fill_(0.3)
    model.deviation.fill_(2.0)
    whole = torch.tensor([[*ANSWERS[0].prompt, *ANSWERS[0].tokens]])
    wanted = (float(model(whole).detach()[0, -1]) - 0.3) / 2.0
    assert scores(model)[0] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("given", ["nonsense", 3, torch.nn.Linear(1, 1)])
def test_what_gives_no_rewards_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="invalid reward"):
        scorer_of(given, TOKENIZER)


def named(name: str, value: float) -> Any:
    def function(*, completions: list[str]) -> list[float]:
        return [value] * len(completions)

    function.__name__ = name
    return function


@pytest.mark.parametrize(
    "names", [("f", "f_2", "f"), ("f", "f", "f_1"), ("f_1", "f", "f"), ("f", "f", "f", "f_1", "f_2")]
)
def test_no_reward_of_a_list_is_lost_by_a_name(names: tuple[str, ...]) -> None:
    given = [named(name, 10.0**place) for place, name in enumerate(names)]
    assert scores(given) == [sum(10.0**place for place in range(len(names)))] * 2
    members = reward_members(given)
    assert list(members.values()) == given
    assert all(members[name] in given and members[name].__name__ == name for name in set(names))


@pytest.mark.parametrize("value", [{1.0, 2.0}, frozenset((1.0, 2.0)), [{1.0}, 2.0]])
def test_rewards_without_an_order_are_refused(value: Any) -> None:
    with pytest.raises(TrainingError, match=r"set|invalid reward"):
        scores(lambda *, completions: value)
    with pytest.raises(ConfigError, match=r"(?s)invalid reward.*set"):
        scorer_of({lowercase_fraction, exact_match}, TOKENIZER)


def test_a_bound_argument_is_not_replaced_by_a_column() -> None:
    def scaled(scale: float, *, completions: list[str], **columns: Any) -> list[float]:
        assert "scale" not in columns
        return [scale * len(text) for text in completions]

    def closed(*, completions: list[str], scale: float = 1.0) -> list[float]:
        return [scale * len(text) for text in completions]

    answers = [answer("a", "xyz", scale=100.0), answer("b", "x", scale=100.0)]
    assert scores(partial(closed, scale=2.0), answers) == [6.0, 2.0]
    assert scores(partial(scaled, scale=2.0), answers) == [6.0, 2.0]
    assert scores(partial(scaled, 2.0), answers) == [6.0, 2.0]
    assert scores(partial(partial(closed, scale=3.0), scale=2.0), answers) == [6.0, 2.0]
    # What is not bound is a column's.
    assert scores(lambda *, completions, scale: scale, answers) == [100.0, 100.0]


def test_weighted_rewards_that_cancel_are_zero() -> None:
    given = {"plus": (0.1, lambda *, completions: [3.0, 0.0]), "minus": (-0.3, lambda *, completions: [1.0, 0.0])}
    assert scores(given) == [0.0, 0.0]
    small = {"plus": (1.0, lambda *, completions: [1.0, 1.0]), "bonus": (1e-7, lambda *, completions: [1.0, 0.0])}
    assert scores(small | {"minus": (-1.0, lambda *, completions: [1.0, 1.0])})[0] != 0.0
