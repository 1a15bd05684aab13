"""Exported programs compute what our networks compute for each text alone: in onnxruntime, and by torch.export."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from kitforge.api import load_model, load_processor
from kitforge.cli.main import run as run_command
from kitforge.core.nn.context import Context, EncoderInput
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.encoder_decoder import EncoderDecoder
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.vision import VisionTransformer
from kitforge.foundation.errors import ConfigError, DependencyError
from kitforge.kits.transformers.labelling import SequenceClassifier
from kitforge.kits.transformers.programs import ClassifierProgram, Program, programs_of, write_program
from kitforge.kits.transformers.rows import last_token
from kitforge.models import loading
from kitforge.models.catalog import config_of
from kitforge.models.t5.model import T5Config
from kitforge.models.vit.model import ViTConfig
from tests.kits.transformers.test_adapters import KINDS, base, trained

# torch 2.13 warns of its own internals, also while it loads a program.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")
CPU = torch.device("cpu")
VOCAB = 61
# Decoders and classifiers of every family are drawn, in tests/differential. A program that onnxruntime runs has gone
# through torch.export as well; the rest of the way to ONNX takes twice the time.
PROVES = "KITFORGE_PROVE" in os.environ
FORMATS, TRACED = (["onnx", "torch_export"],) * 2 if PROVES else (["onnx"], ["torch_export"])
# Takes the tensors of a program in its order, and gives all that it computes.
Run = Callable[..., list[Tensor]]


def filled(model: Any, factor: float = 4.0) -> Any:
    """With weights that matter, all of them random."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor).add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval().requires_grad_(False)


def opened(path: Path, program: Program | None = None) -> Run:
    """A file of a program, which takes its inputs in order, those of a list one by one."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(str(path))
        names = [each.name for each in session.get_inputs()]
        if program is not None:
            assert names == program.input_names
            assert [each.name for each in session.get_outputs()] == program.output_names

        def run(*inputs: Tensor) -> list[Tensor]:
            given = dict(zip(names, (each.numpy() for each in inputs), strict=True))
            return [torch.from_numpy(each) for each in session.run(None, given)]

        return run
    module = torch.export.load(path).module()
    assert program is not None
    has_list, count = isinstance(program.inputs[-1], list), len(program.inputs) - 1

    def call(*inputs: Tensor) -> list[Tensor]:
        found = module(*inputs[:count], list(inputs[count:])) if has_list else module(*inputs)
        return [found] if isinstance(found, Tensor) else [found[0], *found[1]]

    return call


def written(model: nn.Module, folder: Path, format: str, **choices: Any) -> list[Run]:
    """The programs of a network, written and read back."""
    suffix = {"onnx": ".onnx", "torch_export": ".pt2"}[format]
    programs = programs_of(model, **choices)
    for program in programs:
        write_program(program, folder / f"{program.name}{suffix}", format)
    return [opened(folder / f"{program.name}{suffix}", program) for program in programs]


def texts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def padded(rows: Sequence[Tensor], columns: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Tokens and mask of rows whose tokens are in those columns; padding is a token that matters."""
    width = 1 + max(max(each) for each in columns)
    tokens, mask = torch.full((len(rows), width), 7), torch.zeros(len(rows), width, dtype=torch.int64)
    for number, (row, own) in enumerate(zip(rows, columns, strict=True)):
        tokens[number, list(own)], mask[number, list(own)] = row, 1
    return tokens, mask


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def empty_past(model: Decoder, rows: int) -> list[Tensor]:
    shape = model.geometry
    return [torch.zeros(rows, shape.num_kv_heads, 0, shape.head_dim) for _ in range(2 * shape.num_layers)]


def assert_near(found: Tensor, expected: Tensor, exact: Tensor | None = None) -> None:
    """Equal to 1e-5 of the largest; beside what is expected in float64, also to what rounding does to the network, in
    the one as much as in the other."""
    assert found.shape == expected.shape
    rounding = 0.0 if exact is None else (expected - exact).abs().max()
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max() + 16 * rounding


def assert_equal_alone(
    found: Tensor, mask: Tensor, rows: Sequence[Tensor], model: Decoder, start: int = 0, exact: Decoder | None = None
) -> None:
    """The logits at the tokens of each row are those of its text alone, from a token on."""
    for logits, is_token, row in zip(found, mask.bool(), rows, strict=True):
        wanted = [network(row.unsqueeze(0))[0, start:] for network in (model, exact) if network is not None]
        assert_near(logits[is_token], *wanted)


@pytest.mark.prove
@pytest.mark.parametrize("format", TRACED)
def test_an_encoder_and_a_decoder(format: str, tmp_path: Path) -> None:
    sizes = {"num_layers": 1, "num_decoder_layers": 2 if PROVES else 1, "num_heads": 3, "head_dim": 6}
    config = T5Config(vocab_size=VOCAB, dim=24, mlp_dim=40, **sizes)
    # Its attention is not scaled: larger weights would magnify rounding a hundredfold.
    model: EncoderDecoder = filled(loading.build(config, device=CPU, level="O0", seed=1), 1.0)
    encode, begin, step = written(model, tmp_path, format)
    sources, targets = texts(9, 4, 6), texts(6, 6, 6)
    tokens, mask = padded(sources, [range(9), range(4), range(3, 9)])
    (states,) = encode(tokens, mask)
    whole = torch.stack(targets)
    logits, *held = begin(mask, whole[:, :1], states)
    found = [logits]
    for new in (slice(1, 2), slice(2, 5), slice(5, 6)):
        logits, *present = step(mask, whole[:, new], *held)
        held = [present[2 * (number // 4) + number % 4] if number % 4 < 2 else each for number, each in enumerate(held)]
        found.append(logits)
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        expected = model(target.unsqueeze(0), Context(source=EncoderInput(tokens=source.unsqueeze(0))))
        assert_near(torch.cat(found, dim=1)[row], expected[0])


@pytest.mark.prove
@pytest.mark.parametrize("format", FORMATS)
def test_a_vision_transformer(format: str, tmp_path: Path) -> None:
    config = ViTConfig(dim=24, num_layers=1, num_heads=3, image_size=8, patch_size=4, labels=("a", "b", "c"))
    network = VisionTransformer(config)
    init_weights(network.named_parameters(), config.num_layers, seed=1)
    model: VisionTransformer = filled(network)
    (run,) = written(model, tmp_path, format)
    for count in (1, 5):
        images = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(count))
        assert_near(run(images)[0], model(images))


@pytest.mark.parametrize("pad_id", [7, 0, None])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_classifier_pools_where_ours_and_transformers_do(pad_id: int | None, side: str) -> None:
    sizes = {"vocab_size": VOCAB, "dim": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 40}
    network = loading.build(config_of({"family": "llama", **sizes, "max_length": 40}), device=CPU, level="O0", seed=1)
    model = filled(SequenceClassifier(network, ("bad", "fair", "good")))
    model.pad_id = pad_id
    # Texts that end with, hold, or are nothing but the padding token.
    rows = [torch.tensor(each) for each in ([5, 7, 9, 7, 7], [3, 4], [0, 6, 0], [7], [0], [7, 0])]
    columns = [range(len(row)) if side == "right" else range(6 - len(row), 6) for row in rows]
    logits = ClassifierProgram(model)(*padded(rows, columns))
    ends = [last_token(row.tolist(), pad_id) for row in rows]
    pairs = zip(rows, ends, strict=True)
    expected = torch.cat(
        [model.logits_at(row.unsqueeze(0), torch.tensor([end]), torch.tensor([len(row)])) for row, end in pairs]
    )
    assert_near(logits, expected)


ALONE = """
import sys, torch
module = torch.export.load(sys.argv[1]).module()
tokens = torch.arange(24).unsqueeze(0)
past = [torch.zeros(1, int(sys.argv[3]), 0, int(sys.argv[4])) for _ in range(2 * int(sys.argv[5]))]
torch.save(module(tokens, torch.ones_like(tokens), tokens, past)[0], sys.argv[2])
assert not any(name.startswith("kitforge") for name in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora"])
def test_a_run_is_exported_with_its_adapter_merged(kind: str, tmp_path: Path, corpus: Path) -> None:
    precision = "bf16" if kind == "lora" else "fp32"
    run = tmp_path / "run"
    trained(run, corpus, base(tmp_path / "base", num_layers=1), KINDS[kind] | {"precision": precision})
    words = [f"checkpoint={run}", "format=torch_export", f"output_dir={tmp_path / 'out'}"]
    assert run_command(["export", *words]) == 0
    model = cast(Decoder, load_model(run))
    shape = model.geometry
    sizes = map(str, (shape.num_kv_heads, shape.head_dim, shape.num_layers))
    files = [str(tmp_path / name) for name in ("out/model.pt2", "logits.pt")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE, *files, *sizes], check=True, cwd=tmp_path)
    expected = model(torch.arange(24).unsqueeze(0)).detach()
    assert_near(torch.load(files[1]), expected)
    before = cast(Decoder, load_model(tmp_path / "base"))(torch.arange(24).unsqueeze(0))
    assert not torch.allclose(before, expected, atol=1e-3)


@pytest.mark.slow
def test_the_command_writes_a_folder_with_configuration_and_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As if the weights were too large for the file.
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 1000)
    folder, out = base(tmp_path / "base", num_layers=1), tmp_path / "out"
    words = ["export", f"checkpoint={folder}", f"output_dir={out}", "format=onnx"]
    assert run_command(words) == 0
    assert str(out / "model.onnx") in "".join(capsys.readouterr().out.split())
    assert {"model.onnx", "model.onnx.data", "config.json", "kitforge_tokenizer.json"} <= {
        each.name for each in out.iterdir()
    }
    assert not list(out.glob(".*.draft"))
    model = cast(Decoder, load_model(folder))
    tokens = torch.tensor([load_processor(out).encode("Beautiful is")])
    ones, positions = torch.ones_like(tokens), torch.arange(tokens.shape[1]).unsqueeze(0)
    logits, *_ = opened(out / "model.onnx")(tokens, ones, positions, *empty_past(model, 1))
    assert_near(logits, model(tokens))
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["vocab_size"]) == ("llama", "float32", 258)


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = base(tmp_path / "base"), tmp_path / "out"
    words = ["export", f"checkpoint={folder}", f"output_dir={out}"]
    with pytest.raises(ConfigError, match="format"):
        run_command([*words, "format=tflite"])
    for task in ("dpo", "recommendation"):
        with pytest.raises(ConfigError, match="format"):
            run_command([*words, "format=onnx", f"task={task}"])
    for dtype, format in (("bfloat16", "onnx"), ("q8_0", "torch_export")):
        with pytest.raises(ConfigError, match=f"dtype={dtype}"):
            run_command([*words, f"format={format}", f"dtype={dtype}"])
    with pytest.raises(ConfigError, match="output_dir=FOLDER"):
        run_command(["export", f"checkpoint={folder}", "format=onnx"])
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(DependencyError, match=r"kitforge\[onnx\]"):
        run_command([*words, "format=onnx"])
    assert not out.exists()
