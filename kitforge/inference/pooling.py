"""Embeddings: one vector of a text, pooled from the outputs of its tokens, as sentence-transformers defines it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kitforge.foundation.errors import ModelError
from kitforge.foundation.files import write_text
from kitforge.foundation.untrusted import parse_json

# Of the outputs of all tokens, special ones included: the last, the mean, the first.
PoolingMode = Literal["last", "mean", "cls"]
# What config.json of a pooling module calls them: its keys, and in newer ones the values of `pooling_mode`.
_MODES: dict[str, PoolingMode] = {"pooling_mode_lasttoken": "last", "lasttoken": "last"}
_MODES |= {"pooling_mode_mean_tokens": "mean", "mean": "mean", "pooling_mode_cls_token": "cls", "cls": "cls"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPooling:
    """How a model embeds a text."""

    mode: PoolingMode
    normalize: bool  # to length 1


def pooled(outputs: Sequence[Tensor], mode: PoolingMode) -> Tensor:
    """The vector [dim] in fp32 on the CPU of outputs [tokens, dim], see `Sequence.keep_outputs`. They are joined first,
    so that a sum does not depend on how the text was cut into steps."""
    rows = torch.cat(list(outputs)).float()
    return (rows.mean(0) if mode == "mean" else rows[-1]).cpu()


def pool_rows(outputs: Tensor, lengths: Tensor, mode: PoolingMode) -> Tensor:
    """The vectors [B, dim], in fp32 at least, of outputs [B, T, dim] of rows with these numbers of tokens [B], at least
    one, and padding behind them."""
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if mode == "cls":
        return outputs[:, 0]
    if mode == "last":
        return outputs[torch.arange(len(lengths), device=outputs.device), lengths - 1]
    is_token = torch.arange(outputs.shape[1], device=outputs.device) < lengths.unsqueeze(1)
    return torch.where(is_token.unsqueeze(2), outputs, 0.0).sum(1) / lengths.unsqueeze(1)


def write_pooling(folder: Path, pooling: TextPooling, dim: int, max_length: int) -> None:
    """Write what sentence-transformers reads beside a Hugging Face folder, and `find_pooling` anywhere."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if pooling.normalize else [])]
    paths = [f"{number}_{kind}" if number else "" for number, kind in enumerate(kinds)]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    names = {name: mode == pooling.mode for name, mode in _MODES.items() if name.startswith("pooling_mode_")}
    files: dict[str, Any] = {
        "modules.json": modules,
        f"{paths[1]}/config.json": {"word_embedding_dimension": dim, **names},
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, json.dumps(content, indent=2) + "\n")


def find_pooling(folder: Path | None, mode: PoolingMode | None, normalize: bool | None) -> TextPooling | ModelError:
    """The pooling of a folder; arguments that are not None come first. An error for a folder that says nothing of it,
    or what is not supported: its model generates texts all the same, so the error waits for who asks for a vector."""
    try:
        found = _read(folder)
    except ModelError as error:
        if mode is None:
            return error
        found = TextPooling(mode=mode, normalize=True)
    return TextPooling(mode=mode or found.mode, normalize=found.normalize if normalize is None else normalize)


def _read(folder: Path | None) -> TextPooling:
    """The pooling by modules.json and what it names. Raises ModelError."""
    problem, got = "this model has no pooling information, without which it embeds no texts", "no modules.json"
    try:
        if folder is not None and (folder / "modules.json").is_file():
            modules = parse_json((folder / "modules.json").read_bytes())
            kinds = [each["type"].rpartition(".")[2] for each in modules]
            config = parse_json((folder / modules[1]["path"] / "config.json").read_bytes())
            names = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
            (name,) = names or [config["pooling_mode"]]
            if kinds[:2] == ["Transformer", "Pooling"] and kinds[2:] in ([], ["Normalize"]) and name in _MODES:
                return TextPooling(mode=_MODES[name], normalize=len(kinds) == 3)
            problem, got = "this model embeds texts in an unknown way", f"{', '.join(kinds)}; {name}"
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        problem, got = "the pooling information of this model cannot be read", f"{type(error).__name__}: {error}"
    expected = "modules.json of sentence-transformers: Transformer, Pooling (lasttoken, mean or cls), perhaps Normalize"
    raise ModelError(problem, got=got, expected=expected, fix="start it with serve.pooling=last, mean or cls")
