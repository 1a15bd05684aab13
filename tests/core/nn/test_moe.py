"""The router, the experts and their balance, against the definition written as loops, in float64."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn import moe
from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.lora import LoraConfig, attach
from kitforge.core.nn.moe import ExpertsConfig, MoE, MoEConfig
from kitforge.core.nn.quantized import quantize_linears, quantized_copy
from kitforge.core.parallel.expert_load import LOAD, check_balance, experts_of, load_of, load_sums, move_biases
from kitforge.core.parallel.parallelize import parallelize
from kitforge.core.parallel.sharding import Sharding
from kitforge.core.parallel.world import ALONE
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.log import noting_warnings
from tests.core.nn.networks import MIXTRAL, build, documents_of, packed

DIM, HIDDEN, NUM, TOP = 10, 6, 6, 2
PLAIN = ExpertsConfig(num_experts=NUM, top_k=TOP)
WEIGHT = torch.tensor(0.25, dtype=torch.float64)


def layer(level: CompileLevel = "O1", **options: Any) -> MoE:
    found = MoE(MoEConfig(dim=DIM, hidden_dim=HIDDEN, experts=replace(PLAIN, **options)), select(level)).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in found.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return found


def stream(batch: int = 3, length: int = 5) -> Tensor:
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def by_loops(module: MoE, input: Tensor) -> Tensor:
    """One token after the other, each expert a dense MLP."""
    output = torch.zeros_like(input)
    routing = module.router(input)
    for row, position in torch.cartesian_prod(*map(torch.arange, input.shape[:2])).tolist():
        token, found = input[row, position], torch.zeros(DIM, dtype=torch.float64)
        for choice, weight in zip(routing.choices[row, position], routing.weights[row, position], strict=True):
            gate, up, down = (each[choice] for each in (module.experts.gate, module.experts.up, module.experts.down))
            found = found + weight * (down @ (functional.silu(gate @ token) * (up @ token)))
        output[row, position] = found + (0.0 if module.shared is None else module.shared(token))
    return output


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("options", [{}, {"num_shared": 2}, {"top_k": 6}, {"top_k": 1, "scale": 2.5}], ids=str)
def test_a_mixture_is_its_loop_over_tokens(options: dict[str, Any], level: CompileLevel) -> None:
    module, input = layer(level, **options), stream().requires_grad_()
    leaves = [input, *module.parameters()]
    results = []
    for output in (module(input, Context()), by_loops(module, input)):
        gradients = torch.autograd.grad(output.square().sum(), leaves)
        results.append(torch.cat([each.flatten() for each in (output, *gradients)]))
    assert torch.allclose(*results, rtol=1e-10, atol=1e-10)


def test_scores_choices_and_weights_are_those_of_the_published_routers() -> None:
    input = stream()
    softmax, sigmoid = layer(), layer(scoring="sigmoid", scale=2.0, balance="bias")
    logits = input @ softmax.router.weight.T
    found = softmax.router(input)
    assert torch.allclose(found.scores, logits.softmax(-1))
    assert torch.equal(found.choices, logits.topk(TOP).indices)
    assert torch.allclose(found.weights, logits.topk(TOP).values.softmax(-1))
    bias = sigmoid.router.bias
    assert bias is not None
    chosen, raw = sigmoid.router(input), (input @ sigmoid.router.weight.T).sigmoid()
    assert torch.equal(chosen.choices, (raw + bias).topk(TOP).indices)
    own = raw.gather(-1, chosen.choices)
    assert torch.allclose(chosen.weights, 2.0 * own / own.sum(-1, keepdim=True))
    assert torch.allclose(chosen.scores, raw / raw.sum(-1, keepdim=True))
    assert torch.allclose(layer(normalize=False).router(input).weights, logits.softmax(-1).topk(TOP).values)


def test_experts_are_chosen_from_the_best_groups() -> None:
    module = layer(num_groups=3, top_groups=1)
    scores = (stream() @ module.router.weight.T).softmax(-1)
    best = scores.unflatten(-1, (3, 2)).sum(-1).argmax(-1, keepdim=True)
    assert torch.equal(module.router(stream()).choices // 2, best.expand(-1, -1, TOP))
    assert module.router(stream()[:0]).choices.shape == (0, *stream().shape[1:2], TOP)


def test_of_equal_scores_the_lower_number_comes_first() -> None:
    module = layer(top_k=3)
    with torch.no_grad():
        module.router.weight.copy_((64 * module.router.weight[[0, 1, 0, 1, 0, 1]]).round())
    # Sums of whole numbers are exact: a product may sum each output in an order of its own.
    choices = module.router((64 * stream(8, 40)).round() / 64).choices
    assert set(map(tuple, choices.flatten(0, 1).tolist())) == {(0, 2, 4), (1, 3, 5)}


@pytest.mark.parametrize(
    "options",
    [
        {"num_experts": 0},
        {"top_k": 7},
        {"num_groups": 4},
        {"num_groups": 3, "top_groups": 4},
        {"num_groups": 3, "top_groups": 1, "top_k": 3},
        {"capacity_factor": 0.0},
        {"balance_weight": -1.0},
    ],
    ids=str,
)
def test_impossible_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="model.experts."):
        replace(PLAIN, **options)


def trained(module: MoE, input: Tensor, **context: Any) -> dict[str, Tensor]:
    """The gradients of the balance alone, and the load."""
    module.zero_grad()
    output = module(input, Context(loss_weight=WEIGHT, **context))
    (output * 0).sum().backward()
    assert module.router.weight.grad is not None
    assert module.load is not None
    return {"router": module.router.weight.grad.clone(), "load": module.load}


def balance_by_loops(module: MoE, input: Tensor, documents: Tensor, counted: Tensor) -> Tensor:
    """The gradient of DeepSeek-V3's sequence-wise balance of each document, times its tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for row, numbers in enumerate(documents):
        for number in numbers.unique():
            chosen = (numbers == number) & counted[row]
            if chosen.any():
                routing = module.router(input[row, chosen].unsqueeze(0))
                fractions = torch.bincount(routing.choices.flatten(), minlength=NUM) * NUM / (TOP * int(chosen.sum()))
                total = total + int(chosen.sum()) * (fractions * routing.scores[0].mean(0)).sum()
    (found,) = torch.autograd.grad(total, [module.router.weight])
    return found


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 2], [3, 3, 3, 3, 3]])
COUNTED = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()


def test_the_balance_of_each_document_counts_by_its_tokens() -> None:
    module = layer(balance_weight=0.5)
    found = trained(module, stream(), documents=DOCUMENTS, counted=COUNTED)
    wanted = balance_by_loops(module, stream(), DOCUMENTS, COUNTED) * 0.5 * WEIGHT
    assert torch.allclose(found["router"], wanted, atol=1e-12)
    counts = torch.bincount(module.router(stream()).choices[COUNTED].flatten(), minlength=NUM)
    assert found["load"].tolist() == [*counts.tolist(), 0]


@pytest.mark.parametrize(("balance", "is_split"), [("sequence", True), ("batch", False)])
def test_micro_batches_add_up_to_the_batch_unless_the_balance_is_of_a_batch(balance: Any, is_split: bool) -> None:
    module, known = layer(balance=balance), {"documents": DOCUMENTS, "counted": COUNTED}
    whole = trained(module, stream(), **known)
    parts = [
        trained(module, stream()[rows], **{name: each[rows] for name, each in known.items()})
        for rows in (slice(0, 1), slice(1, 3))
    ]
    assert torch.allclose(sum(each["router"] for each in parts), whole["router"], atol=1e-13) == is_split
    assert torch.equal(sum(each["load"] for each in parts), whole["load"])


def test_a_packed_document_is_balanced_as_alone() -> None:
    model, documents = build(MIXTRAL), documents_of(5, 3)
    gradients = []
    for rows in ([documents], [[documents[0]], [documents[1]]]):
        model.zero_grad()
        for row in rows:
            tokens, context = packed(row)
            (model.hidden(tokens, replace(context, loss_weight=WEIGHT)) * 0).sum().backward()
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    assert gradients[0].norm() > 1e-6
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-13)


def test_an_evaluation_neither_balances_nor_counts() -> None:
    module = layer()
    with torch.no_grad():
        module(stream(), Context(loss_weight=WEIGHT))
    module(stream(), Context()).sum().backward()
    assert module.load is None


def test_recomputation_reuses_choices_and_counts_once() -> None:
    model, (document,) = build(replace(MIXTRAL, num_layers=3)), documents_of(12)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.router.weight[2:] = block.mlp.router.weight[:2]  # type: ignore[union-attr]
    found = []
    for model.recompute in (False, True):
        model.zero_grad()
        tokens, context = packed([document])
        model(tokens, replace(context, loss_weight=WEIGHT)).square().sum().backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        found.append([*gradients, load_of(parallelize(model, Sharding(), ALONE), is_composed=True)[LOAD]])
    assert all(map(torch.equal, *found))
    assert found[0][-1][:, :-1].sum(1).tolist() == [24.0] * 3


def test_a_pass_with_a_place_for_its_load_leaves_that_of_the_module_alone() -> None:
    module, loads = layer(), dict[nn.Module, Tensor]()
    module(stream(2, 12), Context(loss_weight=WEIGHT))
    assert module.load is not None
    before = module.load.clone()
    module(stream(1, 5), Context(loss_weight=WEIGHT, loads=loads))
    assert torch.equal(module.load, before)
    assert loads[module][:-1].sum() == 5 * module.config.experts.top_k


def test_an_expert_takes_its_first_tokens_of_a_row_and_the_dropped_are_counted() -> None:
    module, input = layer(top_k=1, capacity_factor=1.0), stream(2, 12)
    choices, capacity = module.router(input).choices.squeeze(-1), 2
    output, kept = module(input, Context(loss_weight=WEIGHT)), torch.zeros(2, 12, dtype=torch.bool)
    for row in range(2):
        for expert in range(NUM):
            kept[row, (choices[row] == expert).nonzero().flatten()[:capacity]] = True
    assert not kept.all()
    whole = by_loops(module, input)
    assert torch.allclose(output[kept], whole[kept])
    assert (output[~kept] == 0).all()
    assert module.load is not None
    assert module.load[-1] == (~kept).sum()
    assert load_sums(module.load.unsqueeze(0))["experts/dropped"] == (~kept).sum()
    assert torch.allclose(module.eval()(input, Context()), whole)
    one_row = layer(top_k=1, capacity_factor=1.0)(input[:1], Context())
    assert torch.allclose(one_row, output[:1])


def test_a_row_without_tokens_is_no_special_case() -> None:
    module, input = layer(), stream(2, 0).requires_grad_()
    module(input, Context(loss_weight=WEIGHT)).sum().backward()
    assert all(torch.equal(each.grad, torch.zeros_like(each)) for each in module.parameters() if each.requires_grad)


def test_metrics_of_a_load() -> None:
    load = torch.tensor([[4.0, 2.0, 0.0, 1.0], [2.0, 2.0, 2.0, 0.0]], dtype=torch.float64)
    found = {name: float(each) / 12 for name, each in load_sums(load).items()}
    loads = [found[f"experts/load/{expert}"] for expert in range(3)]
    assert loads == pytest.approx([1.5, 1.0, 0.5])
    assert found["experts/fullest"] == pytest.approx(2.0)
    assert found["experts/dropped"] == pytest.approx(1 / 12)


def test_biases_move_towards_experts_with_fewer_tokens() -> None:
    config = replace(MIXTRAL, experts=replace(MIXTRAL.experts, balance="bias", bias_rate=0.5))
    model = build(config)
    parallel = parallelize(model, Sharding(), ALONE)
    before = [block.mlp.router.bias.clone() for block in model.blocks]  # type: ignore[union-attr]
    move_biases(parallel, torch.tensor([[4.0, 2.0, 0.0, 2.0, 9.0], [0.0, 8.0, 0.0, 0.0, 9.0]]))
    moved = [
        block.mlp.router.bias - own  # type: ignore[union-attr]
        for block, own in zip(model.blocks, before, strict=True)
    ]
    assert torch.allclose(moved[0], torch.tensor([-0.5, 0.0, 0.5, 0.0]).double())
    assert torch.allclose(moved[1], torch.tensor([0.5, -0.5, 0.5, 0.5]).double())


def test_the_bias_of_a_frozen_router_stays() -> None:
    model = build(replace(MIXTRAL, experts=replace(MIXTRAL.experts, balance="bias", bias_rate=0.5)))
    attach(model, "own", LoraConfig())
    before = {name: each.clone() for name, each in model.named_parameters()}
    move_biases(parallelize(model, Sharding(), ALONE), torch.tensor([[4.0, 2.0, 0.0, 2.0, 9.0]] * len(model.blocks)))
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())


def test_a_balance_over_a_batch_needs_the_batch_in_one_micro_batch() -> None:
    model = Decoder(replace(MIXTRAL, experts=replace(MIXTRAL.experts, balance="batch")))
    check_balance(experts_of(model), 1, 1)
    for micro_batches, replicas in ((2, 1), (1, 2)):
        with pytest.raises(ConfigError, match=r"got: +.*micro-batches(.|\n)*do: .*balance=sequence"):
            check_balance(experts_of(model), micro_batches, replicas)
    check_balance(experts_of(Decoder(MIXTRAL)), 4, 2)


def test_a_task_with_a_loss_of_its_own_says_that_experts_are_not_balanced() -> None:
    model, none = (
        parallelize(Decoder(replace(MIXTRAL, experts=replace(MIXTRAL.experts, balance=each))), Sharding(), ALONE)
        for each in ("bias", "none")
    )
    with noting_warnings() as notes:
        assert load_of(none, is_composed=False) == {}
        assert not notes
        assert load_of(model, is_composed=False) == {}
        assert notes == ["this task trains a mixture of experts without balancing its load"]


@pytest.mark.parametrize("target", ["gate", "up", "down"])
def test_adapters_of_experts_are_refused_by_name(target: str) -> None:
    shared = build(replace(MIXTRAL, experts=replace(MIXTRAL.experts, num_shared=1)))
    with pytest.raises(ModelError, match=rf"experts of a mixture(.|\n)*'{target}'(.|\n)*query, key, value, out"):
        attach(shared, "own", LoraConfig(target_modules=("query", target)))
    attach(shared, "own", LoraConfig(target_modules=("query", "value")))


def test_quantized_weights_of_experts_are_refused() -> None:
    model = build(MIXTRAL, dtype=torch.float32)
    with pytest.raises(ModelError, match="experts of a mixture"):
        quantized_copy(model)
    with pytest.raises(ModelError, match="experts of a mixture"):
        quantize_linears(model, 8)


@pytest.mark.parametrize("fault", ["document", "drop"])
def test_a_planted_fault_shows(fault: str) -> None:
    if fault == "document":
        together = torch.zeros(15, dtype=torch.int64)
        planted = mock.patch.object(moe, "_segments", lambda *_: (together, 1))
        with planted, pytest.raises(AssertionError):
            test_the_balance_of_each_document_counts_by_its_tokens()
    else:
        planted = mock.patch.object(moe, "_within_capacity", lambda choices, *_: choices.new_full(choices.shape, NUM))
        with planted, pytest.raises(AssertionError):
            test_an_expert_takes_its_first_tokens_of_a_row_and_the_dropped_are_counted()
