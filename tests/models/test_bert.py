"""BERT and RoBERTa: what transformers computes, both ways, and an encoder's place among language models."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

from kitforge.api import pipeline, save_model
from kitforge.core.nn.causal_lm import padded_context
from kitforge.core.nn.context import Context
from kitforge.core.nn.encoder import Encoder
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.inference.engine import Engine
from kitforge.models import loading
from kitforge.models.bert.model import BertConfig
from kitforge.models.catalog import config_of, without_head

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "intermediate_size": 40}
SIZES |= {"initializer_range": 0.2, "max_position_embeddings": 34}
# Drawn by hand so that every option of the architecture takes two values.
DRAWN: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"num_attention_heads": 4, "hidden_act": "gelu", "layer_norm_eps": 1e-3}),
    "bert_tanh": ("Bert", {"num_attention_heads": 2, "hidden_act": "gelu_new", "type_vocab_size": 3}),
    "bert_relu": ("Bert", {"num_attention_heads": 3, "hidden_act": "relu"}),
    "roberta": ("Roberta", {"num_attention_heads": 4, "type_vocab_size": 1, "pad_token_id": 1}),
    "roberta_pad": ("Roberta", {"num_attention_heads": 2, "hidden_act": "gelu_new", "pad_token_id": 4}),
}


def peer(name: str, folder: Path, head: str = "ForMaskedLM") -> Any:
    """A network of transformers with drawn weights, vectors too, and its folder."""
    kind, options = DRAWN[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    model = getattr(transformers, kind + head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [3, 17] and their lengths; padding is 60."""
    draw = torch.Generator().manual_seed(3)
    tokens, lengths = torch.randint(5, 60, (3, 17), generator=draw), torch.tensor([17, 5, 1])
    return torch.where(torch.arange(17) < lengths[:, None], tokens, 60), lengths


@pytest.mark.parametrize("name", DRAWN)
def test_logits_are_those_of_transformers_and_its_folder_is_written_back(name: str, tmp_path: Path) -> None:
    theirs = peer(name, tmp_path / "theirs")
    ours = loading.load(tmp_path / "theirs", device=CPU)
    tokens, lengths = rows()
    is_token = torch.arange(17) < lengths[:, None]
    # RoBERTa counts positions by the tokens that are not padding.
    ids = torch.where(is_token, tokens, theirs.config.pad_token_id)
    types = torch.randint(0, theirs.config.type_vocab_size, ids.shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        wanted = theirs(input_ids=ids, attention_mask=is_token.long(), token_type_ids=types).logits
        context = padded_context(ours, tokens, lengths)
        found = ours(tokens, Context(documents=context.documents, token_types=types))
        assert wanted[is_token].abs().max() > 1
        assert (found - wanted)[is_token].abs().max() < 1e-5
        loading.save(ours, tmp_path / "ours")
        again, notes = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert not notes["missing_keys"] and not notes["unexpected_keys"]
        back = again.eval()(input_ids=ids, attention_mask=is_token.long(), token_type_ids=types).logits
        assert (back - wanted)[is_token].abs().max() < 1e-5
    written, own = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("ours", "theirs"))
    ignored = {"transformers_version", "initializer_range", "use_cache", "torch_dtype", "dtype"}
    for key in written.keys() & own.keys() - ignored:
        assert written[key] == own[key], key


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = peer(name, tmp_path).double()
    theirs.config._attn_implementation = "eager"
    ours = loading.load(tmp_path, device=CPU).double()
    tokens, _ = rows()
    tokens = tokens[:1]
    weights = torch.randn(1, 17, 61, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for model, given in ((theirs, {"input_ids": tokens}), (ours, {"tokens": tokens})):
        found = model(**given)
        (getattr(found, "logits", found) * weights).sum().backward()
    converter = loading.converter_of(ours.config)
    named = dict(theirs.named_parameters())
    for each in converter.tensor_mappings(cast(BertConfig, ours.config), ""):
        got, wanted = ours.get_parameter(each.ours).grad, named[each.theirs].grad
        assert got is not None and wanted is not None
        assert torch.allclose(got, wanted, atol=1e-8, rtol=1e-6), each.ours


@pytest.mark.parametrize(("name", "head"), [("bert", "Model"), ("roberta", "ForSequenceClassification")])
def test_a_folder_without_the_head_gives_its_hidden_states(name: str, head: str, tmp_path: Path) -> None:
    theirs = peer(name, tmp_path, head)
    if head != "Model":
        theirs = theirs.roberta
        theirs.save_pretrained(tmp_path)
    ours = cast(Encoder, loading.load(tmp_path, device=CPU))
    tokens, _ = rows()
    with torch.no_grad():
        wanted = theirs(input_ids=tokens[:1]).last_hidden_state
        assert (ours.hidden(tokens[:1]) - wanted).abs().max() < 1e-5
    with pytest.raises(ModelError, match="no head for masked tokens"):
        ours(tokens)


def test_a_later_token_is_read_and_padding_is_not() -> None:
    network = loading.build(BertConfig(vocab_size=61, dim=24, num_layers=2, num_heads=2), device=CPU, seed=3).double()
    tokens, lengths = rows()
    with torch.no_grad():
        found = network.hidden(tokens, padded_context(network, tokens, lengths))
        for row, length in enumerate(lengths.tolist()):
            alone = network.hidden(tokens[row : row + 1, :length])
            assert torch.allclose(found[row, :length], alone[0], atol=1e-12)
        changed = tokens.clone()
        changed[0, 16] = 7
        assert not torch.allclose(network.hidden(changed[:1])[0, 0], found[0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "silu"}, "another activation"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_another_architecture_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    peer("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=f"(?s){message}"):
        loading.open_model(tmp_path)


def test_an_encoder_is_no_language_model(tmp_path: Path) -> None:
    values = {"family": "bert", "vocab_size": 258, "dim": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ConfigError, match="(?s)another kind.*task=masked_lm"):
        config_of(values, "language model")
    config = config_of(values)
    network = loading.build(config, device=CPU, seed=1)
    with pytest.raises(ModelError, match="writes no text"):
        Engine(network)
    save_model(network, tmp_path, ByteTokenizer())
    with pytest.raises(ModelError, match="writes no text"):
        pipeline("text_generation", model=tmp_path)("a")
    assert "head_dense.weight" not in dict(loading.build_on_meta(without_head(config)).named_parameters())
