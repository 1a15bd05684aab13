"""The keys of config.json that mean the same for every family; those of a family are in its convert.py."""

import re

from kitforge.foundation.known_keys import KnownKeys

# Options of `generate`, which configurations of transformers before version 5 hold too.
_GENERATION = """
bad_words_ids begin_suppress_tokens cache_config cache_implementation constraints diversity_penalty do_sample
early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
exponential_decay_length_penalty force_words_ids guidance_scale length_penalty low_memory max_length max_new_tokens
max_time min_length min_new_tokens min_p no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
penalty_alpha prefill_chunk_size remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate
sequence_bias stop_strings suppress_tokens temperature token_healing top_k top_p typical_p use_cache
"""
# What describes the file, its classes and its training.
_NOTES = """
architectures attn_implementation auto_map dtype finetuning_task flash_attn gradient_checkpointing id2label is_decoder
keys_to_ignore_at_inference label2id label_smoothing loss_type model_name model_type num_labels pretraining_tp
predict_special_tokens prefix problem_type return_dict tasks task_specific_params tf_legacy_loss tokenizer_class
torch_dtype torchscript unsloth_fixed use_bfloat16 use_return_dict
"""
# Lengths of training that no network is made of, and how products are computed, which changes rounding alone.
_SIZES = """
chunk_size_feed_forward max_seq_len max_sequence_length model_max_length n_ctx reorder_and_upcast_attn seq_len
seq_length sequence_length slow_but_exact
"""
# Of our reward models.
_SCORES = "score_bias score_mean score_deviation"
# Private notes, versions, ids of tokens, options of outputs, of initial weights, of dropout, and of GPT-2's summary.
_NAMES = re.compile(
    r"_.*|.*_version|transformers\.js.*|.*_token|.*_token_ids?|.*_token_index|output_.*|initializer_.*|.*dropout.*"
    r"|.*_pdrop|summary_.*|tokenizer_.*|neftune_.*|use_flash.*"
)
_QUANTIZED = "load the unquantized weights; inference.engine.quantization quantizes them here"

CONFIG_KEYS = KnownKeys(
    file="config.json",
    refusal="a network of another architecture",
    obeyed=frozenset({"tie_word_embeddings", "vocab_size"}),
    accepted={
        "is_causal": (True,),
        "add_cross_attention": (False, None),
        "cross_attention_hidden_size": (None,),
        "is_encoder_decoder": (False, None),
        "tie_encoder_decoder": (False, None),
        "pruned_heads": ({}, None),
        "quantization_config": (None, {}),
        "quantization": (None, {}),
        "compression_config": (None, {}),
    },
    unused=frozenset(f"{_GENERATION} {_NOTES} {_SIZES} {_SCORES}".split()),
    unused_names=_NAMES,
    fixes={name: _QUANTIZED for name in ("quantization_config", "quantization", "compression_config")},
)
