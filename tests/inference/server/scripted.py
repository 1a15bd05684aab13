"""A server whose tiny model says what it is told to, so that calls and answers come without a trained one."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kitforge.data.tokenizers.huggingface import HuggingFaceTokenizer
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.service import Service
from kitforge.inference.text_engine import InferenceOptions, TextEngine
from tests.data.chat.cases import save_tokenizer
from tests.tiny import built
from tests.trainer import tiny


@contextlib.contextmanager
def saying(script_of: Callable[[Any], list[int]]) -> Iterator[None]:
    """The script of a sequence are the tokens that its model says, where the request lets it; what it is held to
    otherwise comes from random weights."""
    sample = Engine._sample

    def scripted(engine: Engine, works: Any, logits: torch.Tensor, hidden: Any) -> None:
        ready = [work for work in works if work.needs_logits]
        # A row for each draft token and one more.
        rows = [(work.sequence, count) for work in ready for count in range(len(work.draft_tokens) + 1)]
        for row, (sequence, count) in enumerate(rows):
            own = script_of(sequence)
            place = len(sequence.tokens) - sequence.prompt_length + count
            logits[row, own[min(place, len(own) - 1)]] += 1000
        sample(engine, works, logits, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_sample", scripted)
        yield


def chat_service(folder: Path, template: str, special: list[str] | None = None, max_length: int = 2048) -> Service:
    """A service of random weights with a chat template, whose special tokens may have further ones."""
    save_tokenizer(folder, "bytes", template)
    if special:
        from tokenizers import Tokenizer

        known = Tokenizer.from_file(str(folder / "tokenizer.json"))
        known.add_special_tokens(special)
        known.save(str(folder / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(folder)
    model = built(tiny.LLAMA, tokenizer.vocab_size, max_length=max_length)
    texts = TextEngine(Engine(model, EngineOptions(), stop_ids=tokenizer.eos_ids), tokenizer)
    return Service(texts, "tiny", InferenceOptions(max_new_tokens=16), ServeOptions())


def without_ids(value: Any) -> Any:
    """A response or event without what each has of its own."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    own = {"id", "item_id", "call_id", "created_at"}
    return {name: without_ids(value[name]) for name in value.keys() - own} if isinstance(value, dict) else value
