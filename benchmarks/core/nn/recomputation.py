"""What selective and full activation recomputation save, and what they cost.

    python -m benchmarks.core.nn.recomputation        # writes recomputation.md

Four blocks of width 512 over one row of 1024 tokens, one thread. Memory is counted, so it repeats to the byte: the
bytes of tensors that a pass over the blocks leaves behind for the backward pass, beside those that the shapes give, and
the most that are alive at once in a step. Steps take turns, in processor time; a ratio is the median over rounds
of that to the same round's `none`.
"""

import platform
import statistics
import time
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.command_line import CommandLine, write_result
from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.kernels.dispatch import select
from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.init import init_weights
from kitforge.models.gpt2.model import GPT2Config
from kitforge.models.llama.model import LlamaConfig

NUM_LAYERS, DIM, HEADS, KV_HEADS, MLP_DIM, LENGTH, VOCAB, ROUNDS = 4, 512, 8, 4, 1408, 1024, 256, 9
SMOKE = {"NUM_LAYERS": 2, "DIM": 32, "HEADS": 4, "KV_HEADS": 2, "MLP_DIM": 64, "LENGTH": 16, "ROUNDS": 1}
MIB = 2**20


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, from birth to death, beside those of the parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, Any] = {each.untyped_storage()._cdata: None for each in model.parameters()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for each in output if isinstance(output, (list, tuple)) else [output]:
            if isinstance(each, Tensor):
                self._add(each.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size == 0:
            return

        def end(_: object) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, end)
        self.now += size
        self.most = max(self.most, self.now)


def build(family: str) -> Decoder:
    """A network of the family, in fp32."""
    shape: dict[str, Any] = {"vocab_size": VOCAB, "dim": DIM, "num_layers": NUM_LAYERS, "num_heads": HEADS}
    if family == "gpt2":
        model = Decoder(GPT2Config(**shape, max_length=LENGTH), select("O1"))
    else:
        model = Decoder(LlamaConfig(**shape, num_kv_heads=KV_HEADS, mlp_dim=MLP_DIM, max_length=LENGTH), select("O1"))
    init_weights(model.named_parameters(), NUM_LAYERS, seed=0)
    return model


def expected_bytes(family: str, recompute: Recompute, half: bool) -> int:
    """The bytes that the blocks leave behind, by the shapes. The stream and statistics are in fp32; all that a product
    reads or returns is in the dtype of products, and so are the rounded weights, which only `none` leaves."""
    size, kv = 2 if half else 4, DIM if family == "gpt2" else DIM * KV_HEADS // HEADS
    stream, softmax = 4 * DIM, 4 * HEADS
    if recompute == "full":
        return NUM_LAYERS * LENGTH * stream
    heads = 2 * DIM + 2 * kv  # queries, keys, values and what attention returns
    if family == "gpt2":
        up, activated, matrices, statistics_of_norms = 4 * DIM, 4 * DIM, 12 * DIM * DIM, 16
    else:
        up, activated, statistics_of_norms = 2 * MLP_DIM, MLP_DIM, 8
        matrices = 2 * DIM * (DIM + kv) + 3 * DIM * MLP_DIM
    if recompute == "selective":
        # The output projection of attention is kept; that of the MLP is read by nothing.
        return NUM_LAYERS * LENGTH * (stream + size * (heads + DIM + up) + softmax)
    token = 2 * stream + size * (2 * DIM + heads + up + activated) + softmax + statistics_of_norms
    # Biases are rounded as well.
    biases = 9 * DIM if family == "gpt2" else 0
    return NUM_LAYERS * (LENGTH * token + (2 * (matrices + biases) if half else 0))


def around(half: bool) -> AbstractContextManager[object]:
    """Autocast, or nothing."""
    return torch.autocast("cpu", torch.bfloat16) if half else nullcontext()


def count(model: Decoder, tokens: Tensor, half: bool) -> tuple[int, int]:
    """The bytes that a pass over the blocks leaves behind, and the most in a step."""
    with Live(model) as live:
        with around(half):
            stream = model.run(model.embed(tokens, Context()), model.encode_positions(tokens, Context()), Context())
        kept = live.now - stream.nbytes
        loss = stream.square().mean()
        del stream
        loss.backward()
        most = live.most
    model.zero_grad(set_to_none=True)
    return kept, most


def seconds(model: Decoder, tokens: Tensor, half: bool) -> float:
    """Of processor time, of a forward and a backward pass."""
    begin = time.process_time()
    with around(half):
        hidden = model.hidden(tokens)
    hidden.square().mean().backward()
    taken = time.process_time() - begin
    model.zero_grad(set_to_none=True)
    return taken


def rows(family: str, half: bool) -> list[str]:
    """The lines of the table."""
    model = build(family)
    tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    kinds: tuple[Recompute, ...] = get_args(Recompute)
    times: dict[Recompute, list[float]] = {kind: [] for kind in kinds}
    memory = {}
    for kind in kinds:
        model.recompute = kind
        seconds(model, tokens, half)
        memory[kind] = count(model, tokens, half)
    for turn in range(ROUNDS):
        for kind in kinds[turn % 3 :] + kinds[: turn % 3]:
            model.recompute = kind
            times[kind].append(seconds(model, tokens, half))
    lines = []
    for kind in kinds:
        kept, most = memory[kind]
        ratio = statistics.median(one / none for one, none in zip(times[kind], times["none"], strict=True))
        lines.append(
            f"| {family}, {'bf16' if half else 'fp32'} | {kind} | {kept / MIB:.1f} |"
            f" {expected_bytes(family, kind, half) / MIB:.1f} | {kept / memory['none'][0]:.2f} | {most / MIB:.1f} |"
            f" {statistics.median(times[kind]) * 1e3:.0f} | {ratio:.2f} |"
        )
    return lines


def main() -> None:
    """Print the table and write the page."""
    CommandLine(__doc__).parse(SMOKE, globals())
    torch.set_num_threads(1)
    head = "| | recomputed | kept MiB | by the shapes | of none | most in a step | step ms | of none |"
    table = [head, "|---|---|---|---|---|---|---|---|"]
    for family in ("gpt2", "llama"):
        for half in (False, True):
            table += rows(family, half)
    text = "\n".join(table)
    page = f"""# Activation recomputation

{time.strftime("%Y-%m-%d")}, {platform.processor() or platform.machine()}, one thread, torch {torch.__version__};
{NUM_LAYERS} blocks of width {DIM} over {LENGTH} tokens, `python -m benchmarks.core.nn.recomputation`. GPT-2 has {HEADS}
heads and an MLP of {4 * DIM}, llama {KV_HEADS} heads of keys and a SwiGLU of {MLP_DIM}. "Kept" are the bytes that the
blocks leave behind for the backward pass, counted and by the shapes; "most in a step" has the gradients too.

{text}
"""
    print(text)
    write_result(Path(__file__).with_suffix(".md"), page)


if __name__ == "__main__":
    main()
