"""The optimizer on the host: the bits of one on the device, whatever is resumed, skipped, frozen or late."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.kernels.autograd import mixed_precision
from kitforge.core.nn.linear import Linear
from kitforge.core.parallel.offload import Offload
from kitforge.foundation import device as devices
from kitforge.foundation.errors import ConfigError
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from kitforge.verify.run_equality import last_checkpoint, run_differences
from tests.kits.recommender import runs as recommender
from tests.kits.rlhf import runs as rlhf
from tests.patience import PATIENCE
from tests.trainer import regression, tiny

MODES = ("optimizer", "optimizer_and_gradients")
CLIPPED = {"trainer.max_grad_norm": 0.05}
# Without compiled kernels, but in one case: a fresh checkout would compile them first.
SHORT = {"trainer.max_steps": 3, "trainer.eval_every": 2, "compile_level": "O0"}
MIXTURE = {"family": "mixtral", "dim": 32, "num_layers": 2, "num_heads": 2, "mlp_dim": 16, "max_length": 128}
CASES: dict[str, dict[str, Any]] = {
    "clipped": CLIPPED,
    "micro_batches": {
        "model": tiny.GPT2 | tiny.DROPOUT,
        "trainer.micro_batch_size": 1,
        "precision": "bf16",
    },
    "tied_sgd": {"model": tiny.LLAMA | {"tie_embeddings": True}, "optimizer.name": "sgd", "precision": "bf16"},
    "fraction": {**CLIPPED, "trainer.offload_fraction": 0.5, "precision": "bf16"},
    "frozen": {"freeze": ["embedding.*", "blocks.0.*", "*norm.weight"], "precision": "bf16"},
    "experts": {
        "model": MIXTURE | {"experts": {"num_experts": 3, "top_k": 2}},
        "trainer.micro_batch_size": 2,
        "precision": "bf16",
        "compile_level": "O1",
        **CLIPPED,
    },
}


@pytest.fixture(autouse=True)
def native_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in bf16, as a GPU has them: others take weights in fp32 where there are some."""
    monkeypatch.setitem(mixed_precision.NATIVE_DTYPES, torch.bfloat16, True)


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Callable[[str], Path]]:
    """The folder of the run of a case without offload, made once."""
    folder = tmp_path_factory.mktemp("on_device")

    def find(case: str) -> Path:
        if not (folder / case).exists():
            choices = {name: each for name, each in CASES[case].items() if name != "trainer.offload_fraction"}
            tiny.run(folder / case, corpus, SHORT | choices)
        return folder / case

    yield find


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of blocks come back to the device no sooner than somebody waits for them."""
    is_asked = threading.Event()
    give_back, wait = Offload._return, Offload.wait

    def give_back_late(self: Offload, names: Sequence[str], *further: Any) -> Any:
        if any(".blocks." in f".{name}" for name in names) and self._pending:
            assert is_asked.wait(PATIENCE)
        return give_back(self, names, *further)

    def asked(self: Offload, block: int | None = None) -> None:
        if block != 0:
            is_asked.set()
        wait(self, block)
        is_asked.clear()

    monkeypatch.setattr(Offload, "_return", give_back_late)
    monkeypatch.setattr(Offload, "wait", asked)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_run_has_the_bits_of_one_on_the_device(
    tmp_path: Path, corpus: Path, on_device: Callable[[str], Path], case: str, mode: str
) -> None:
    tiny.run(tmp_path / "run", corpus, SHORT | CASES[case] | {"trainer.offload": mode})
    assert run_differences(tmp_path / "run", on_device(case), with_state=False) == []


@pytest.mark.parametrize("mode", MODES)
def test_an_adapter_has_the_bits_of_one_on_the_device(
    tmp_path: Path, corpus: Path, on_device: Callable[[str], Path], mode: str
) -> None:
    adapter = SHORT | {"checkpoint": str(on_device("clipped")), "lora.rank": 2, "precision": "bf16"}
    for name, chosen in (("none", "none"), ("host", mode)):
        tiny.run(tmp_path / name, corpus, adapter | {"model": {}, "trainer.offload": chosen})
    assert run_differences(tmp_path / "host", tmp_path / "none", with_state=False) == []


class Weights(Callback):
    """Keeps all weights after every step."""

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "step":
            self.seen.append([each.detach().float().clone() for each in run.model.parameters()])


@pytest.mark.usefixtures("late")
def test_every_block_waits_for_its_own_weights(tmp_path: Path, corpus: Path, on_device: Callable[[str], Path]) -> None:
    tiny.run(tmp_path / "run", corpus, SHORT | CLIPPED | {"trainer.offload": "optimizer"})
    assert run_differences(tmp_path / "run", on_device("clipped"), with_state=False) == []


@pytest.mark.usefixtures("late")
def test_a_callback_sees_the_weights_of_its_step(tmp_path: Path, corpus: Path) -> None:
    seen = []
    for mode in ("none", *MODES):
        seen.append(Weights())
        tiny.run(tmp_path / mode, corpus, SHORT | {"trainer.offload": mode}, callbacks=[seen[-1]])
    for each in seen[1:]:
        for step, wanted in zip(each.seen, seen[0].seen, strict=True):
            assert all(map(torch.equal, step, wanted))


EVERY_STEP = {
    "trainer.max_steps": 4,
    "trainer.checkpoint_every": 1,
    "trainer.save_total_limit": 100,
    "trainer.eval_every": 2,
    "trainer.micro_batch_size": 2,
    "precision": "bf16",
    "compile_level": "O0",
    **CLIPPED,
}
SWITCHES = random.Random(0).sample(sorted(itertools.product(("none", *MODES), ("none", *MODES), (1, 2, 3))), 5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], Path]:
    """The uninterrupted run of a mode, made once."""
    folder = tmp_path_factory.mktemp("whole")

    def find(mode: str) -> Path:
        if not (folder / mode).exists():
            tiny.run(folder / mode, corpus, EVERY_STEP | {"trainer.offload": mode})
        return folder / mode

    return find


@pytest.mark.parametrize(("saved", "resumed", "step"), [*SWITCHES, (MODES[1], MODES[1], 2), (MODES[1], "none", 1)])
def test_a_run_that_was_killed_goes_on_under_any_mode(
    tmp_path: Path, corpus: Path, whole: Callable[[str], Path], saved: str, resumed: str, step: int
) -> None:
    tiny.copy_up_to(whole(saved), tmp_path / "again", step)
    tiny.run(tmp_path / "again", corpus, EVERY_STEP | {"trainer.offload": resumed, "resume": "auto"})
    assert run_differences(tmp_path / "again", whole("none"), with_state=False) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_has_the_names_and_dtypes_of_one_without(whole: Callable[[str], Path], mode: str) -> None:
    def forms(folder: Path) -> dict[str, tuple[Any, ...]]:
        checkpoint = last_checkpoint(folder)
        tensors = dict(checkpoint.model()) | dict(checkpoint.optimizer())
        return {name: (each.shape, each.dtype) for name, each in tensors.items()}

    assert forms(whole(mode)) == forms(whole("none"))


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_is_not_finite_is_skipped_whole(tmp_path: Path, mode: str) -> None:
    recorders = []
    for name, chosen in (("none", "none"), ("host", mode)):
        recorders.append(regression.Recorder())
        task = regression.Regression(broken=(3, 4))
        regression.train(tmp_path / name, task, callbacks=[recorders[-1]], offload=chosen)
    one, other = recorders
    assert one.updates == other.updates
    for step in one.weights:
        assert all(map(torch.equal, one.weights[step], other.weights[step]))
        assert all(map(torch.equal, one.optimizer[step], other.optimizer[step]))


@pytest.mark.parametrize("mode", MODES)
def test_a_run_leaves_a_network_on_the_device_in_its_own_dtype(tmp_path: Path, corpus: Path, mode: str) -> None:
    run = tiny.run(tmp_path / "run", corpus, SHORT | {"trainer.offload": mode, "precision": "bf16"})
    saved = dict(last_checkpoint(tmp_path / "run").model())
    for name, each in run.loop.model.named_parameters():
        assert each.dtype is torch.float32 and torch.equal(each.detach(), saved[name])
    assert not run.loop.model._forward_pre_hooks and not any(
        module._forward_pre_hooks for module in run.loop.model.modules()
    )


def test_gradients_leave_one_at_a_time_and_matrices_of_blocks_stay_in_half_precision(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny.begin(
        tmp_path / "run", corpus, SHORT | {"trainer.offload": MODES[1], "precision": "bf16", "trainer.eval_every": 9}
    )
    others: list[int] = []
    dtypes: dict[str, torch.dtype] = {}
    add = Offload.add

    def counted(self: Offload, name: str, gradient: Tensor) -> None:
        model = run.loop.model
        others.append(sum(each.grad.nbytes for each in model.parameters() if each.grad is not None))
        dtypes.update((name, each.dtype) for name, each in model.named_parameters())
        add(self, name, gradient)

    monkeypatch.setattr(Offload, "add", counted)
    tiny.finish(run)
    assert len(others) == 3 * len(dtypes) and set(others) == {0}
    for name, module in run.loop.model.named_modules():
        for own, _ in module.named_parameters(recurse=False):
            is_half = isinstance(module, Linear) and name.startswith("blocks.")
            assert dtypes[f"{name}.{own}".lstrip(".")] is (torch.bfloat16 if is_half else torch.float32), name


def test_weights_in_half_precision_train_as_their_masters_would_on_the_device(tmp_path: Path, corpus: Path) -> None:
    """Without products in bf16 too: rounded weights, gradients added in fp32, AdamW over masters."""
    options = SHORT | {"trainer.micro_batch_size": 2, "precision": "bf16", "trainer.max_grad_norm": 0.0}
    mixed_precision.NATIVE_DTYPES[torch.bfloat16] = False
    got = tiny.run(tmp_path / "host", corpus, options | {"trainer.offload": MODES[1], "schedule.name": "constant"})
    loop = tiny.begin(tmp_path / "device", corpus, options | {"schedule.name": "constant"}).loop
    model, task = loop.model, loop.task
    masters = {name: nn.Parameter(each.detach().clone()) for name, each in model.named_parameters()}
    for module in (each for name, each in model.named_modules() if isinstance(each, Linear) and "blocks." in name):
        module.weight.data = module.weight.data.bfloat16()
    groups = [
        {"params": [masters[name] for name in group.names], "weight_decay": group.weight_decay}
        for group in loop.state.groups
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    model.train()
    rates = [record["learning_rate"] for record in tiny.records(tmp_path / "host", "train")]
    for rate, step in zip(rates, task.steps(model, loop.state.cursor), strict=False):
        count = float(task.count(step)["loss"])
        for micro_batch in step:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = task.loss(model, micro_batch)["loss"]
            (loss * (1.0 / count)).backward()
            for name, each in model.named_parameters():
                gradient, each.grad = each.grad.float(), None
                masters[name].grad = gradient if masters[name].grad is None else masters[name].grad + gradient
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        for name, each in model.named_parameters():
            each.data.copy_(masters[name].data)
    for name, each in got.loop.model.named_parameters():
        assert torch.equal(each.detach(), masters[name].detach()), name


def test_rollouts_are_drawn_from_the_weights_of_the_last_step(late: None) -> None:
    lines = []
    for mode in ("none", *MODES):
        run = rlhf.begin("ppo", choices={"trainer.offload": mode, "trainer.max_steps": 2})
        metrics = rlhf.finish(run)
        lines.append([metrics, *(each.detach().clone() for each in run.loop.model.parameters())])
    for each in lines[1:]:
        assert each[0] == lines[0][0]
        assert all(map(torch.equal, each[1:], lines[0][1:]))


@pytest.mark.parametrize("mode", MODES)
def test_the_dense_network_of_a_recommender_is_updated_on_the_host_and_its_tables_where_they_are(
    tmp_path: Path, mode: str
) -> None:
    one = recommender.run(tmp_path / "none", choices=CLIPPED)[1]
    other = recommender.run(tmp_path / "host", choices=CLIPPED | {"trainer.offload": mode})[1]
    assert recommender.same(one, other)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"optimizer.name": "muon"}, "optimizer.name"),
        ({"compile_level": "O2"}, "compile_level"),
        ({"precision": "fp16"}, "precision"),
        ({"trainer.offload_fraction": 0.0}, "trainer.offload_fraction"),
    ],
)
def test_what_cannot_run_is_refused_with_its_options(choices: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        tiny.KIT.read_options(tiny.nested({"trainer.offload": MODES[1], **choices}))
    assert all(part in str(caught.value) for part in ("got", "expected", "trainer.offload"))


def test_a_host_without_the_memory_is_refused_before_a_rank_starts(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "free_host_memory", lambda: 100_000)
    chosen = {"trainer.offload": MODES[0], "model": tiny.LLAMA}
    with pytest.raises(ConfigError, match="too little memory") as caught:
        tiny.KIT.check_parallel(tiny.KIT.read_options(tiny.nested(tiny.OPTIONS | chosen | {"parallel.shard": 2})))
    assert "offload_fraction=" in str(caught.value) and "0.0001 GB free" in str(caught.value)
    with pytest.raises(ConfigError, match="too little memory"):
        tiny.run(tmp_path / "run", corpus, chosen)
    monkeypatch.setattr(devices, "free_host_memory", lambda: 0)  # unknown
    tiny.KIT.check_parallel(tiny.KIT.read_options(tiny.nested(tiny.OPTIONS | chosen | {"parallel.shard": 2})))
