"""Generation with drawn settings beside `transformers`: the same greedy texts of ragged batches, the same distribution
of the next token, the same beams of targets, or a refusal that is listed here."""

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from kitforge.core.kernels.dispatch import REFERENCE
from kitforge.data.tokenizers.loading import Tokenizer, load_tokenizer
from kitforge.foundation.errors import DataError
from kitforge.inference.constraint import constraint_of
from kitforge.inference.folder_defaults import with_folder_search
from kitforge.inference.options import EngineOptions
from kitforge.inference.pipeline import TextGenerationPipeline
from kitforge.inference.sampling import SampleRequest, SamplingOptions, process_logits, sample_tokens
from kitforge.inference.seq2seq import Seq2SeqInference, generate_targets
from kitforge.inference.text_engine import InferenceOptions
from kitforge.models import loading
from tests.differential.drawn import drawn

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore")  # of settings that greedy texts do not use
CPU = torch.device("cpu")
PAD, EOS, LETTERS = 0, 1, "abcdefgh"
PIECES = ["<pad>", "</s>", *LETTERS, "ab", "cd", "abc", "ha"]
VOCAB = len(PIECES)
# Below this margin between the two likeliest tokens either of them may be called so.
MARGIN = 1e-4

# Settings of a folder that `transformers` generates by and we refuse, with values that change a text.
REFUSED: dict[str, tuple[Any, str]] = {
    "begin_suppress_tokens": ([2, 3], "only the first token is another"),
    "exponential_decay_length_penalty": ([2, 1.5], "the end becomes likelier with the length"),
    "forced_bos_token_id": (3, "a first token that the network does not choose"),
    "forced_eos_token_id": (1, "a last token that the network does not choose"),
    "guidance_scale": (1.5, "a second pass without the prompt"),
    "min_length": (9, "an option of the caller's"),
    "min_new_tokens": (4, "an option of the caller's"),
    "no_repeat_ngram_size": (2, "runs of tokens that occurred are excluded"),
    "num_beams": (2, "texts are not searched with beams; targets are"),
    "sequence_bias": ([[[3], 2.0]], "an option of the caller's, logit_bias"),
    "watermarking_config": ({"bias": 2.0}, "a watermark"),
}
# Where the order of steps differs, which the oracle of the distribution follows: ours is that of the other servers.
DIFFERS = {
    "logit_bias": "is added after the penalties, where sequence_bias comes before the repetition penalty",
    "min_p": "excludes tokens before top_p does, not after",
}
# Of a folder, which change no greedy text.
SILENT: dict[str, st.SearchStrategy[Any]] = {
    "do_sample": st.booleans(),
    "temperature": st.floats(0.1, 3.0),
    "top_k": st.integers(1, 9),
    "top_p": st.floats(0.1, 1.0),
    "min_p": st.floats(0.0, 1.0),
    "typical_p": st.floats(0.1, 0.9),
    "epsilon_cutoff": st.floats(0.01, 0.3),
    "eta_cutoff": st.floats(0.01, 0.3),
    "length_penalty": st.floats(-1.0, 2.0),
    "early_stopping": st.booleans(),
    "max_length": st.integers(20, 40),
    "renormalize_logits": st.booleans(),
    "use_cache": st.booleans(),
}
NEUTRAL = {
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "num_beams": 1,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "repetition_penalty": 1.0,
    "guidance_scale": None,
}
PENALTIES = st.sampled_from([1.0, 1.3, 0.6]) | st.floats(0.2, 4.0)


@functools.cache
def networks(family: str) -> tuple[Any, Any, Path]:
    """A network of theirs, ours of its weights, and their folder."""
    options: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": EOS}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    if family == "GPT2":
        options |= {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    elif family == "Bloom":
        options |= {"hidden_size": 16, "n_layer": 2, "n_head": 2}
    else:
        options |= {"hidden_size": 16, "head_dim": 8, "max_position_embeddings": 64, **sizes}
    torch.manual_seed(len(family))
    name = family + ("LMHeadModel" if family == "GPT2" else "ForCausalLM")
    peer = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**options)).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    folder = Path(tempfile.mkdtemp())
    peer.save_pretrained(folder)
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    merges = [("a", "b"), ("c", "d"), ("ab", "c"), ("h", "a")]
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    pieces.decoder = tokenizers.decoders.Fuse()
    pieces.add_special_tokens(PIECES[:2])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, pad_token="<pad>", eos_token="</s>")
    fast.save_pretrained(folder)
    return peer, loading.load(folder, device=CPU).requires_grad_(False), folder


@functools.cache
def fast_tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(networks("Llama")[2], padding_side="left")


def tokenizer_of(family: str, settings: Mapping[str, Any]) -> Tokenizer:
    folder = networks(family)[2]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


@st.composite
def folders(draw: st.DrawFn) -> dict[str, Any]:
    """The generation_config.json of a folder, with settings that we compute, and that change no greedy text."""
    words = st.text(LETTERS, min_size=1, max_size=3)
    tokens = st.integers(1, VOCAB - 1)
    computed: dict[str, st.SearchStrategy[Any]] = {
        # Ours ends with the tokenizer's end too, whatever else the folder names.
        "eos_token_id": st.lists(tokens, max_size=3).map(lambda more: [EOS, *more]),
        "repetition_penalty": PENALTIES,
        "suppress_tokens": st.lists(tokens, max_size=4),
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=6),
        "stop_strings": words | st.lists(words, min_size=1, max_size=3),
    }
    silent = {key: st.just(value) for key, value in NEUTRAL.items()} | SILENT
    chosen = draw(st.lists(st.sampled_from(sorted(silent)), max_size=4, unique=True))
    settings = {"pad_token_id": PAD, "eos_token_id": EOS} | {key: draw(silent[key]) for key in chosen}
    settings |= {key: draw(each) for key, each in computed.items() if draw(st.booleans())}
    # Theirs counts the padding of a batch among the tokens that occurred.
    settings["suppress_tokens"] = [PAD, *(settings.get("suppress_tokens") or [])]
    return settings


TEXTS = st.lists(st.text(LETTERS, min_size=1, max_size=7), min_size=1, max_size=3)


@drawn(40)
@given(st.sampled_from(["Llama", "GPT2", "Bloom"]), folders(), TEXTS, st.integers(1, 9), st.integers(0, 5))
def test_greedy_texts_are_those_of_transformers(
    family: str, settings: dict[str, Any], texts: list[str], longest: int, shortest: int
) -> None:
    peer, model, _ = networks(family)
    shortest = min(shortest, longest)
    tokenizer = tokenizer_of(family, settings)
    options = InferenceOptions(
        max_new_tokens=longest,
        min_new_tokens=shortest,
        engine=EngineOptions(block_size=4, max_num_batched_tokens=8, max_num_seqs=2, prompt_lookup_tokens=1),
    )
    found = TextGenerationPipeline(model, tokenizer, options)(texts)
    # Theirs does not find a word that is longer than a text and its padding.
    batch = fast_tokenizer()(texts, return_tensors="pt", padding="max_length", max_length=8)
    lengths = {"max_new_tokens": longest, "min_new_tokens": shortest, "do_sample": False, "max_length": None}
    config = transformers.GenerationConfig(**settings | lengths)
    rows = peer.generate(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        generation_config=config,
        tokenizer=fast_tokenizer(),
        output_logits=True,
        return_dict_in_generate=True,
    )
    stops = settings.get("stop_strings") or []
    stops = [stops] if isinstance(stops, str) else stops
    ends = settings["eos_token_id"]
    for number, (text, (answer,)) in enumerate(zip(texts, found, strict=True)):
        new = rows.sequences[number, batch["input_ids"].shape[1] :].tolist()
        new = new[: next((place for place, token in enumerate(new) if token in [PAD, *_listed(ends)]), len(new))]
        wanted = "".join(PIECES[token] for token in new)
        # Theirs ends too where a stop string began in the prompt; ours looks at what is new.
        cut = min((place for place in map(wanted.find, stops) if place >= 0), default=None)
        assume(cut is not None or not any(stop in text[max(0, len(text) - len(stop) + 1) :] + wanted for stop in stops))
        logits = torch.stack([each[number] for each in rows.logits])[: len(new) + 1]
        top = logits.topk(2).values
        assume(bool((top[:, 0] - top[:, 1] > MARGIN).all()))
        assert answer["generated_text"] == text + wanted[:cut]


def _listed(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_setting_that_changes_a_text_in_another_way_is_refused_by_its_name(key: str) -> None:
    _, model, _ = networks("Llama")
    with pytest.raises(DataError, match=key):
        TextGenerationPipeline(model, tokenizer_of("Llama", {key: REFUSED[key][0]}), InferenceOptions())


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """Options of sampling."""
    optional: dict[str, st.SearchStrategy[Any]] = {
        "top_k": st.integers(1, VOCAB + 3),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": PENALTIES,
        "suppress_tokens": st.lists(st.integers(0, VOCAB - 1), max_size=5).map(tuple),
        "logit_bias": st.dictionaries(st.integers(2, VOCAB - 1).map(str), st.floats(-5, 5), max_size=4),
        "min_new_tokens": st.integers(0, 6),
        "stop_ids": st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=3).map(tuple),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(optional)), max_size=6, unique=True))
    options = {key: draw(optional[key]) for key in chosen}
    return options | {"temperature": draw(st.sampled_from([1.0, 0.5, 2.0]) | st.floats(0.05, 5.0))}


def their_steps(options: Mapping[str, Any], prompt_length: int) -> theirs.LogitsProcessorList:
    """The steps of `transformers`, in our order; see DIFFERS."""
    steps = theirs.LogitsProcessorList()
    if "repetition_penalty" in options:
        steps.append(theirs.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if options.get("logit_bias"):
        bias = {(int(token),): value for token, value in options["logit_bias"].items()}
        steps.append(theirs.SequenceBiasLogitsProcessor(bias))
    if options.get("min_new_tokens"):
        ends = torch.tensor(options.get("stop_ids", (EOS,)))
        steps.append(theirs.MinNewTokensLengthLogitsProcessor(prompt_length, options["min_new_tokens"], ends))
    if options.get("suppress_tokens"):
        steps.append(theirs.SuppressTokensLogitsProcessor(list(options["suppress_tokens"])))
    steps.append(theirs.TemperatureLogitsWarper(options["temperature"]))
    warpers = {"top_k": theirs.TopKLogitsWarper, "min_p": theirs.MinPLogitsWarper, "top_p": theirs.TopPLogitsWarper}
    steps.extend(warper(options[name]) for name, warper in warpers.items() if name in options)
    return steps


ROWS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 10**6)), min_size=1, max_size=3)


@drawn(120)
@given(choices(), ROWS, st.sampled_from([0.5, 2.0, 8.0]))
def test_the_next_token_has_the_distribution_of_transformers(
    options: dict[str, Any], rows: list[tuple[int, int, int]], scale: float
) -> None:
    ours = SamplingOptions(**options)
    logits, requests, wanted = [], [], []
    for prompt, new, seed in rows:
        drawn_by = torch.Generator().manual_seed(seed)
        # In float64, where no two sums lie on different sides of an edge by rounding.
        logits.append(torch.randn(VOCAB, generator=drawn_by, dtype=torch.float64) * scale)
        history = torch.randint(VOCAB, (prompt + new,), generator=drawn_by)
        bans = constraint_of(ours, options.get("stop_ids", (EOS,)), history.tolist()[:prompt], VOCAB, None)
        masks = None
        if bans is not None:
            for token in history.tolist()[prompt:]:
                bans.advance(token)
            masks = bans.masks([])
        requests.append(
            SampleRequest(
                options=ours,
                signature=ours.signature(),
                history=history.tolist(),
                prompt_length=prompt,
                position=new,
                key=seed,
                allowed=None if masks is None else masks[0],
            )
        )
        wanted.append(their_steps(options, prompt)(history[None], logits[-1][None].clone())[0])
    scores = process_logits(torch.stack(logits), ours, requests)
    theirs_scores = torch.stack(wanted)
    assert torch.equal(scores > float("-inf"), theirs_scores > float("-inf"))
    expected = theirs_scores.log_softmax(-1)
    torch.testing.assert_close(scores.softmax(-1), expected.exp(), rtol=1e-6, atol=1e-9)
    tokens, logprobs, _ = sample_tokens(torch.stack(logits), requests, kernels=REFERENCE)
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), chosen, rtol=1e-6, atol=1e-7)


@drawn(16)
@given(st.sampled_from([4, 3, 2, 1]), st.floats(-1.5, 3.0), st.integers(1, 16), st.data())
def test_targets_are_those_of_transformers(beams: int, penalty: float, longest: int, data: st.DataObject) -> None:
    peer, model = _targets()
    sources = data.draw(st.lists(st.lists(st.integers(2, 10), min_size=1, max_size=7), min_size=4, max_size=9))
    width = max(map(len, sources))
    tokens = torch.tensor([source + [PAD] * (width - len(source)) for source in sources])
    mask = torch.tensor([[1] * len(source) + [0] * (width - len(source)) for source in sources])
    # The rules differ for few sources, so each is asked about all of them; without beams there is none.
    for early_stopping in (False, True, "never")[: 3 if beams > 1 else 1]:
        settings = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early_stopping}
        options = with_folder_search(Seq2SeqInference(max_new_tokens=longest, batch_size=3), settings)
        found = generate_targets(model, sources, options, start_id=PAD, eos_ids=[EOS], pad_id=PAD)
        wanted = peer.generate(tokens, attention_mask=mask, max_new_tokens=longest, do_sample=False, **settings)
        for ours, row in zip(found, wanted[:, 1:].tolist(), strict=True):
            assert ours == row[: next((place for place, token in enumerate(row) if token == EOS), len(row))]


@functools.cache
def _targets() -> tuple[Any, Any]:
    """Networks whose targets end at many lengths, with probabilities so even that the length decides among beams."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    torch.manual_seed(6)
    config = transformers.T5Config(vocab_size=11, decoder_start_token_id=PAD, pad_token_id=PAD, **sizes)
    peer = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.mul_(0.5).add_(torch.randn_like(parameter) * 0.1)
    folder = Path(tempfile.mkdtemp())
    peer.save_pretrained(folder)
    return peer, loading.load(folder, device=CPU)
