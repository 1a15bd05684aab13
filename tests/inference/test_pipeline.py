"""Texts in, Hugging Face's shapes out; a stream never cuts a character."""

import copy
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.inference.pipeline import TextGenerationPipeline
from kitforge.inference.text_engine import InferenceOptions
from tests.tiny import built
from tests.trainer import tiny

TEXTS = ["the sun", "a", "old café"]


@pytest.fixture(scope="module")
def pipeline() -> TextGenerationPipeline:
    model = built(tiny.LLAMA, ByteTokenizer.vocab_size)
    return TextGenerationPipeline(model, ByteTokenizer(), InferenceOptions(max_new_tokens=6, temperature=1.0))


def test_a_text_gives_a_list_of_one_answer_and_texts_one_for_each(pipeline: TextGenerationPipeline) -> None:
    answers = pipeline("the sun")
    assert [list(answer) for answer in answers] == [["generated_text"]]
    every = pipeline(TEXTS)
    assert every[0] == answers and len(every) == len(TEXTS)
    assert all(answer[0]["generated_text"].startswith(text) for answer, text in zip(every, TEXTS, strict=True))
    assert pipeline([]) == []


def test_samples_of_a_text_differ_and_the_first_is_the_only_one_asked_for_alone(
    pipeline: TextGenerationPipeline,
) -> None:
    samples = pipeline(TEXTS, num_samples=3)
    assert [each[0] for each in samples] == [each[0] for each in pipeline(TEXTS)]
    assert all(len({answer["generated_text"] for answer in each}) == 3 for each in samples)


def test_a_text_ends_before_a_stop_string(pipeline: TextGenerationPipeline) -> None:
    whole = pipeline("a", max_new_tokens=30)[0]["generated_text"]
    stop = whole[9:12]
    cut = pipeline("a", max_new_tokens=30, stop=[stop, "never said"])[0]["generated_text"]
    assert cut == "a" + whole[1 : whole.index(stop, 1)]
    assert "a" + "".join(pipeline.stream("a", max_new_tokens=30, stop=[stop])) == cut


def test_a_chat_is_answered_in_its_own_shape(pipeline: TextGenerationPipeline) -> None:
    chat = [{"role": "user", "content": "the sun?"}]
    answer = pipeline(chat)[0]["generated_text"]
    assert answer[:-1] == chat
    assert answer[-1]["role"] == "assistant"
    plain = pipeline("\n\nHuman: the sun?\n\nAssistant: ")[0]["generated_text"]
    assert plain.endswith(answer[-1]["content"])
    again = [*answer, {"role": "user", "content": "and the river?"}]
    several = pipeline([chat, again], num_samples=2)
    assert several[0][0]["generated_text"] == answer
    assert [len(sample["generated_text"]) for sample in several[1]] == [4, 4]
    assert "".join(pipeline.stream(chat)) == answer[-1]["content"]


def test_a_reply_that_the_chat_has_begun_goes_on(pipeline: TextGenerationPipeline) -> None:
    chat = [{"role": "user", "content": "the sun?"}, {"role": "assistant", "content": "It s"}]
    before, reply = pipeline(chat)[0]["generated_text"]
    assert before == chat[0]
    plain = pipeline("\n\nHuman: the sun?\n\nAssistant: It s")[0]["generated_text"]
    assert plain.endswith(reply["content"])
    assert reply["content"].startswith("It s")
    assert reply["content"] == "It s" + "".join(pipeline.stream(chat))


def test_a_weight_that_changes_is_heard(pipeline: TextGenerationPipeline) -> None:
    model = copy.deepcopy(pipeline.model)
    opened = TextGenerationPipeline(model, ByteTokenizer(), pipeline.options)
    text = "the sun sings over the river and the stone sleeps"
    before = opened(text)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    fresh = TextGenerationPipeline(model, ByteTokenizer(), pipeline.options)
    assert opened(text) == fresh(text) != before


def test_options_of_a_call_hold_for_that_call(pipeline: TextGenerationPipeline) -> None:
    greedy = pipeline("a", temperature=0, max_new_tokens=2)
    assert greedy == pipeline("a", temperature=0, max_new_tokens=2, seed=9)
    assert len(pipeline("a", temperature=0, max_new_tokens=12)[0]["generated_text"]) > len(greedy[0]["generated_text"])
    with pytest.raises(ConfigError, match="temperature"):
        pipeline("a", temperatur=1.0)


def test_a_stream_is_the_text_in_pieces(pipeline: TextGenerationPipeline) -> None:
    for seed in range(5):
        whole = pipeline("a", max_new_tokens=20, seed=seed)[0]["generated_text"]
        assert "a" + "".join(pipeline.stream("a", max_new_tokens=20, seed=seed)) == whole


def test_streams_may_be_read_in_turn_or_left(pipeline: TextGenerationPipeline) -> None:
    texts = ["".join(pipeline.stream(text, max_new_tokens=20)) for text in TEXTS]
    streams = [pipeline.stream(text, max_new_tokens=20) for text in TEXTS]
    left = pipeline.stream("left", max_new_tokens=20)
    next(left)
    got = [""] * len(TEXTS)
    for pieces in itertools.zip_longest(*streams, fillvalue=""):
        got = [text + piece for text, piece in zip(got, pieces, strict=True)]
    assert got == texts
    left.close()
    assert pipeline(TEXTS[0])[0]["generated_text"].startswith(TEXTS[0])


def test_an_engine_is_not_for_one_call(pipeline: TextGenerationPipeline) -> None:
    with pytest.raises(ConfigError, match="fixed when a pipeline is made"):
        pipeline("a", engine={"max_num_seqs": 2})
    with pytest.raises(ConfigError, match="dtype='bf16' for one call"):
        pipeline("a", dtype="bf16")


def test_a_continuation_is_what_its_call_asks_for(pipeline: TextGenerationPipeline, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))

    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return schema

    for given in (schema, str(tmp_path / "schema.json"), tmp_path / "schema.json", Model):
        [[answer]] = pipeline(["x"], schema=given, max_new_tokens=60)
        assert json.loads(answer["generated_text"][1:])["a"] in (1, 22)
    assert "".join(pipeline.stream("x", choices=["yes", "yeah"])) in ("yes", "yeah")
    chat = [{"role": "user", "content": "hello"}]
    for samples in pipeline([chat, "x"], regex="[ab]{2}c", num_samples=3):
        texts = [each["generated_text"] for each in samples]
        ends = [text[1:] if isinstance(text, str) else text[-1]["content"] for text in texts]
        assert all(re.fullmatch("[ab]{2}c", text) for text in ends)
    # Another call, and other options, are free of it.
    assert pipeline("the sun") == TextGenerationPipeline(pipeline.model, pipeline.tokenizer, pipeline.options)(
        "the sun"
    )


def test_a_call_asks_for_one_structure_that_there_is(pipeline: TextGenerationPipeline, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one structure"):
        pipeline("x", regex="a", choices=["b"])
    with pytest.raises(DataError, match="nope"):
        pipeline("x", schema=tmp_path / "nope.json")
    with pytest.raises(ConfigError, match="uniqueItems"):
        pipeline("x", schema={"uniqueItems": True})
