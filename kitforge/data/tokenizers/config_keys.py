"""The keys of tokenizer_config.json: those that say how a text is cut must say what the vocabulary's file does."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from kitforge.foundation.errors import DataError
from kitforge.foundation.known_keys import KnownKeys
from kitforge.foundation.log import logger, warn_once

TOKENIZER_CONFIG = "tokenizer_config.json"
_log = logger(__name__)

_OBEYED = """
added_tokens_decoder additional_special_tokens chat_template extra_special_tokens model_specific_special_tokens
tokenizer_class add_bos_token add_eos_token add_prefix_space do_lower_case strip_accents sp_model_kwargs legacy
"""
# Padding and cutting are the caller's here, and the text of a prompt never spells a special token by accident.
_CALLERS = """
max_len max_length model_max_length pad_to_multiple_of padding padding_side return_attention_mask return_tensors
return_token_type_ids split_special_tokens stride truncation truncation_side truncation_strategy
"""
# How tokens are written as a text by tokenizers without a tokenizer.json or a sentencepiece model.
_TEXTS = "clean_up_tokenization_spaces errors spaces_between_special_tokens"
# Words of chats for which templates are written, languages and images, of which a text of tokens has none.
_OTHERS = """
encode_special_tokens image_seq_len image_seq_length image_size language language_codes num_image_tokens patch_size
response_schema src_lang task tgt_lang use_default_system_prompt
"""
# What a tokenizer.json or a sentencepiece model holds itself.
_HELD = """
add_dummy_prefix basic_tokenizer bpe_dropout byte_fallback clean_text do_basic_tokenize do_split_on_punc extra_ids fast
fix_mistral_regex from_slow fuse_unk keep_accents keep_newlines merges never_split offset remove_space replacement
suffix_first tokenize_chinese_chars trim_offsets unk_id unk_surface vocab vocab_size wordpieces_prefix
"""
# Files, classes, and the options of from_pretrained, which come with the file that it saves.
_NOTES = """
auto_map backend cache_dir device device_map dtype force_download full_tokenizer_file gguf_file init_inputs is_fast
is_local load_in_4bit load_in_8bit local_files_only max_seq_length merges_file model_input_names name_or_path
processor_class proxies resume_download revision special_tokens_map_file subfolder tokenizer_file tokenizer_type
torch_dtype truncation_strategy trust_remote_code use_auth_token use_fast vocab_file
"""
CONFIG_KEYS = KnownKeys(
    file=TOKENIZER_CONFIG,
    refusal="texts would be cut in another way",
    obeyed=frozenset(_OBEYED.split()),
    unused=frozenset(f"{_CALLERS} {_TEXTS} {_OTHERS} {_HELD} {_NOTES}".split()),
    unused_names=re.compile(r"_.*|.*_version|.*_token|.*_token_(id|ids|type|type_id|box|label|segment_id)"),
    fix="remove the key if it changes nothing in how a text is cut",
)
# Classes that do what `add_prefix_space` says even where a tokenizer.json does otherwise.
_PREFIXING = re.compile(r"(GPT2|Qwen2|Llama|CodeLlama|Roberta|Longformer|GPTNeoX|Deberta|Bart|CodeGen|Cohere)Tokenizer")
# The same of `do_lower_case` and `strip_accents`.
_WORDS = re.compile(
    r"(Bert|DistilBert|Electra|MobileBert|MPNet|Funnel|Splinter|RoFormer|SqueezeBert|LayoutLM|ConvBert)Tokenizer"
)


# Classes of publishers that read a sentencepiece model as LlamaTokenizer does, and those that cut words before it.
_PLAIN = re.compile(
    r"(Llama|CodeLlama|Gemma|T5|ChatGLM\d*|Baichuan|InternLM\d*|Xverse|Orion|Skywork|Yi|Mistral|Aquila|MiniCPM)?"
    r"(PreTrained)?(Tokenizer(Fast)?)?"
)
_CUTTING = re.compile(r"(GPTPangu|CPM|CpmAnt|CPMBee)Tokenizer(Fast)?")


def check_cutting(config: Mapping[str, Any], written: Callable[[str], str], file: str) -> None:
    """Raise DataError for a key that says otherwise than `file`, which holds the vocabulary, how a text is prepared;
    `written` prepares a text as that file says."""
    declared = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    # A lower or bare letter at the end of what is written; another spelling of a letter ends otherwise.
    does = {
        "add_prefix_space": written("a") != "a",
        "do_lower_case": written("xA").endswith("a"),
        "strip_accents": written("x\u00e9").endswith("e"),
    }
    for key, is_done in does.items():
        asked = config.get(key)
        reads = _PREFIXING if key == "add_prefix_space" else _WORDS
        # False is the default of most classes, which write it without obeying it.
        if asked and not is_done or asked is False and is_done and reads.fullmatch(declared):
            raise DataError(
                f"{TOKENIZER_CONFIG}: texts would be cut in another way than {file} cuts them",
                got=f"{key}={asked!r}"[:200],
                expected=f"{key}={str(is_done).lower()}, as {file} does, or no such key",
                fix=f"save the tokenizer with that option again, or correct {key}",
            )
    sampling = config.get("sp_model_kwargs")
    if isinstance(sampling, Mapping) and sampling.get("enable_sampling"):
        raise DataError(
            f"{TOKENIZER_CONFIG}: tokens would be drawn at random",
            got=f"sp_model_kwargs={dict(sampling)!r}"[:200],
            expected="sp_model_kwargs without enable_sampling",
        )


def check_class(config: Mapping[str, Any], file: str) -> None:
    """Raise DataError for a publisher's class with code of its own, which prepares texts before `file` is asked."""
    declared, files = str(config.get("tokenizer_class") or ""), config.get("auto_map")
    has_code = (
        isinstance(files, Mapping)
        and bool(files.get("AutoTokenizer"))
        and not (declared and _PLAIN.fullmatch(declared))
    )
    if has_code or _CUTTING.fullmatch(declared):
        raise DataError(
            f"{TOKENIZER_CONFIG}: texts would be cut in another way than by the code of {declared or 'its tokenizer'}",
            got=f"tokenizer_class={declared}, auto_map={files!r}"[:200],
            expected=f"a class that reads {file} as it is, such as LlamaTokenizer; code of a folder is never run",
            fix="save it as a tokenizer.json, or correct tokenizer_class if its code changes nothing in a text",
        )


def warn_of_frame(config: Mapping[str, Any], begins: bool, ends: bool) -> None:
    """Name `add_bos_token` or `add_eos_token` where a tokenizer.json does otherwise, which decides, as in
    `transformers`."""
    for key, is_done in (("add_bos_token", begins), ("add_eos_token", ends)):
        if isinstance(config.get(key), bool) and config[key] != is_done:
            said = f"{TOKENIZER_CONFIG}: {key}={config[key]} is not what tokenizer.json does, which decides"
            warn_once(_log, said)
