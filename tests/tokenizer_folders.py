"""Small folders with a tokenizer.json, one for each way in which published models begin and end a text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["Beautiful is better than ugly.\nExplicit is better than implicit.\n" * 20]
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
GLM = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
FLAGS = {"add_bos_token": True, "add_eos_token": True}


def byte_level(special: list[str]) -> Tokenizer:
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    pieces.train_from_iterator(CORPUS, trainer)
    return pieces


def gemma_like(special: list[str]) -> Tokenizer:
    """Spaces are letters of words, what has no piece of its own is spelled in bytes."""
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: number for number, token in enumerate([*special, *spelled, "\u2581", "B", "e", "a", "x"])}
    vocabulary |= {"Be": len(vocabulary)}
    pieces = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("B", "e")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    pieces.normalizer = normalizers.Replace(" ", "\u2581")
    pieces.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    pieces.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return pieces


def template(single: str, *special: tuple[str, int]) -> processors.PostProcessor:
    return processors.TemplateProcessing(single=single, special_tokens=list(special))


LLAMA = processors.Sequence([processors.ByteLevel(trim_offsets=False), template("<s> $A", ("<s>", 0))])
GEMMA = template("<bos> $A", ("<bos>", 2))
SOP = template("[gMASK] <sop> $A", ("[gMASK]", 1), ("<sop>", 2))
BOTH = template("<s> $A </s>", ("<s>", 0), ("</s>", 1))
# Special tokens, vocabulary, post-processor, tokenizer_config.json, what comes before and after a text.
KINDS: dict[str, tuple[list[str], Callable[..., Tokenizer], Any, dict[str, Any], list[int], list[int]]] = {
    "llama3": (["<s>", "</s>"], byte_level, LLAMA, ENDS | {"tokenizer_class": "LlamaTokenizerFast"}, [0], []),
    "gpt2": (
        ["<|endoftext|>"],
        byte_level,
        processors.ByteLevel(trim_offsets=False),
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "tokenizer_class": "GPT2Tokenizer"},
        [],
        [],
    ),
    "gemma": (
        ["<pad>", "<eos>", "<bos>", "<unk>"],
        gemma_like,
        GEMMA,
        {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
        [2],
        [],
    ),
    "glm": (["<|endoftext|>", "[gMASK]", "<sop>"], byte_level, SOP, GLM, [1, 2], []),
    # Its generation_config.json names a begin token that the tokenizer does not have.
    "qwen": (
        ["<|endoftext|>", "<|im_end|>"],
        byte_level,
        None,
        {"bos_token": None, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"},
        [],
        [],
    ),
    "both ends": (["<s>", "</s>"], byte_level, BOTH, ENDS, [0], [1]),
    # Where there is a tokenizer.json, transformers 5 goes by its post-processor alone.
    "flags beside a post-processor": (["<s>", "</s>"], byte_level, LLAMA, ENDS | {"add_bos_token": False}, [0], []),
    "flags without a post-processor": (["<s>", "</s>"], byte_level, None, ENDS | FLAGS, [], []),
}


def write_kind(name: str, folder: Path) -> Path:
    special, vocabulary, post_processor, config, _, _ = KINDS[name]
    pieces = vocabulary(special)
    if post_processor is not None:
        pieces.post_processor = post_processor
    folder.mkdir(exist_ok=True)
    pieces.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if name == "qwen":
        (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1, 0]}))
    return folder
