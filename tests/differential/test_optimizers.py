"""Optimizers over drawn groups, options and gradients against torch.optim, and schedules against transformers."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import get_scheduler

from kitforge.core.optim.build import Optimizer, OptimizerConfig, build_optimizer
from kitforge.core.optim.groups import ParameterGroup
from kitforge.core.optim.schedules import ScheduleConfig, lr_scale
from kitforge.foundation.errors import ConfigError
from tests.differential.drawn import drawn

# What torch takes and we do not, with the words that say so.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a rate of 0 learns nothing": ({"learning_rate": 0.0}, "a number above 0"),
    "an eps of 0 divides by zero where a gradient is zero": ({"eps": 0.0}, "a number above 0"),
    "a momentum of 1 never forgets": ({"name": "sgd", "momentum": 1.0}, "below 1"),
}
RATES = st.floats(1e-5, 0.3)
SHAPES = st.sampled_from([(), (1,), (5,), (3, 4), (4, 3), (1, 6), (2, 3, 4)])


@st.composite
def configs(draw: st.DrawFn) -> OptimizerConfig:
    return OptimizerConfig(
        name=draw(st.sampled_from(["adamw", "sgd"])),
        learning_rate=draw(RATES),
        betas=(draw(st.floats(0, 0.99)), draw(st.floats(0, 0.999))),
        eps=draw(st.sampled_from([1e-12, 1e-8, 1e-3])),
        momentum=draw(st.sampled_from([0.0, 0.5, 0.95])),
    )


# Of each group: the shapes of its parameters, its weight decay and its own rate.
GROUPS = st.lists(
    st.tuples(st.lists(SHAPES, min_size=1, max_size=3), st.floats(0, 0.5), st.none() | RATES), min_size=1, max_size=3
)
# Of each step: the scale of the rate, and whether the first parameter has a gradient.
STEPS = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=6)


def oracle_of(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, foreach=False)
    beta1, beta2 = config.betas
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(beta1, beta2), eps=config.eps, foreach=False)


def parameters(groups: list[Any], seed: int) -> list[list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
        for shapes, _, _ in groups
    ]


def built(config: OptimizerConfig, given: list[Any], groups: list[list[nn.Parameter]]) -> Optimizer:
    optimizer = build_optimizer(
        [
            ParameterGroup(
                names=tuple(f"{number}.{place}" for place in range(len(own))),
                parameters=tuple(own),
                weight_decay=decay,
                matrix=False,
                learning_rate=rate,
            )
            for number, (own, (_, decay, rate)) in enumerate(zip(groups, given, strict=True))
        ],
        config,
    )
    # As before the first step of a run.
    optimizer.init_state()
    return optimizer


@given(config=configs(), given=GROUPS, steps=STEPS, stops=st.integers(0, 6), seed=st.integers(0, 2**31))
@drawn(60)
def test_updates_are_those_of_torch_also_after_a_resume(
    config: OptimizerConfig, given: list[Any], steps: list[tuple[float, bool]], stops: int, seed: int
) -> None:
    ours, theirs = parameters(given, seed), parameters(given, seed)
    optimizer = built(config, given, ours)
    options = [
        {"params": own, "weight_decay": decay, "lr": config.learning_rate if rate is None else rate}
        for own, (_, decay, rate) in zip(theirs, given, strict=True)
    ]
    oracle = oracle_of(config, options)
    rates = [group["lr"] for group in oracle.param_groups]
    generator = torch.Generator().manual_seed(seed + 1)
    for number, (scale, has_gradient) in enumerate(steps):
        if number == stops:
            saved = {name: tensor.clone() for name, tensor in optimizer.tensors()}
            optimizer = built(config, given, ours)
            optimizer.load(saved)
        pairs = [pair for own, others in zip(ours, theirs, strict=True) for pair in zip(own, others, strict=True)]
        for place, (one, other) in enumerate(pairs):
            gradient: Tensor | None = torch.randn(one.shape, generator=generator, dtype=torch.float64)
            gradient = gradient if has_gradient or place else None
            one.grad, other.grad = gradient, gradient
        for group, rate in zip(oracle.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        optimizer.step(scale)
        oracle.step()
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_learn_is_refused(name: str) -> None:
    options, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        OptimizerConfig(**options)


@given(
    name=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    total=st.integers(2, 60),
    warmup=st.integers(0, 59),
    final=st.floats(0, 1),
    decay=st.floats(0, 1),
)
@drawn(300)
def test_schedules_are_those_of_transformers(name: Any, total: int, warmup: int, final: float, decay: float) -> None:
    warmup = min(warmup, total - 1)
    config = ScheduleConfig(name=name, warmup_steps=warmup, final_fraction=final, decay_fraction=decay)
    # Theirs begin at 0 and end after the last step: one step ahead of ours with a warmup, one step longer without.
    ahead, length = (1, total) if warmup else (0, total - 1)
    decaying = min(round(decay * total), length - warmup)
    constant: tuple[str, dict[str, Any]] = ("constant_with_warmup", {})
    kind, options = {
        "constant": constant,
        "linear": ("polynomial", {"power": 1.0, "lr_end": final}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": final}),
        "wsd": ("warmup_stable_decay", {"decay_type": "linear", "min_lr_ratio": final, "num_decay_steps": decaying}),
    }[name if name != "wsd" or decaying else "constant"]
    # Above the end of a polynomial, which it wants below the peak.
    if kind == "polynomial" and final == 1.0:
        kind, options = constant
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    oracle = get_scheduler(
        kind, optimizer, num_warmup_steps=warmup, num_training_steps=length, scheduler_specific_kwargs=options
    ).lr_lambdas[0]
    # The least rate of theirs is that of the warmup of `wsd` too, where ours rises from near 0.
    for step in range(warmup if kind == "warmup_stable_decay" else 0, total):
        assert lr_scale(config, step, total) == pytest.approx(oracle(step + ahead), rel=1e-9, abs=1e-12)
