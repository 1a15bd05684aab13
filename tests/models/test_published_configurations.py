"""config.json files with all the keys that publishers and their tools write are read; sizes are small ones."""

from typing import Any

import pytest

from kitforge.models.catalog import converter_of_type

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
LLAMA: dict[str, Any] = {
    **SIZES,
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
}
LATER_LLAMA = LLAMA | {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "rope_theta": 5e5}
QWEN2 = LATER_LLAMA | {
    "model_type": "qwen2",
    "max_window_layers": 21,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "use_mrope": False,
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "model_type": "gpt2",
    "n_ctx": 64,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 320,
}
T5: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 128,
    "d_kv": 16,
    "d_model": 64,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-6,
    "model_type": "t5",
    "num_heads": 4,
    "num_layers": 2,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "vocab_size": 320,
}
CHATGLM: dict[str, Any] = {
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["ChatGLMModel"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
    "bias_dropout_fusion": True,
    "eos_token_id": 2,
    "ffn_hidden_size": 128,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 64,
    "kv_channels": 16,
    "layernorm_epsilon": 1e-5,
    "model_type": "chatglm",
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 2,
    "original_rope": True,
    "pad_token_id": 0,
    "padded_vocab_size": 320,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
}
GEMMA3 = SIZES | {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "use_bidirectional_attention": False,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "LLaMA 2": LLAMA | {"_name_or_path": "meta-llama/Llama-2-7b-hf", "torch_dtype": "float16"},
    "LLaMA 3.1": LATER_LLAMA
    | {"eos_token_id": [128001, 128008, 128009], "rope_scaling": LLAMA3_SCALING, "head_dim": 16},
    "SmolLM2": LATER_LLAMA
    | {"is_llama_config": True, "rope_interleaved": False, "tie_word_embeddings": True}
    | {"pad_token_id": 2, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    "DeepSeek Coder": LLAMA | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000},
    "Unsloth": LLAMA
    | {"unsloth_fixed": True, "unsloth_version": "2024.9", "dtype": "bfloat16"}
    | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "a finetune of Vicuna's scripts": LLAMA
    | {"tokenizer_model_max_length": 2048, "tokenizer_padding_side": "right", "max_sequence_length": 2048}
    | {"use_flash_attention_2": True, "_flash_attn_2_enabled": True, "neftune_noise_alpha": 5, "pad_token": "<pad>"},
    "Mistral 0.1": LLAMA | {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": 4096},
    "Mistral 0.3": LLAMA | {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None, "head_dim": 16},
    "Mixtral 8x7B": LLAMA
    | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "attention_dropout": 0.0}
    | {"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1e6}
    | {"router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0, "sliding_window": None},
    "Qwen2.5": QWEN2,
    "Qwen3": QWEN2 | {"model_type": "qwen3", "attention_bias": False, "head_dim": 32, "sliding_window": None},
    "Qwen3 30B A3B": QWEN2
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 32}
    | {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 32, "norm_topk_prob": True}
    | {"num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001}
    | {"sliding_window": None},
    "SmolLM3": LATER_LLAMA
    | {"model_type": "smollm3", "layer_types": ["full_attention"] * 2, "max_window_layers": 28}
    | {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1], "sliding_window": None, "use_sliding_window": False},
    "Gemma 3": GEMMA3,
    "GPT-2": GPT2,
    "DistilGPT-2": GPT2 | {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
    "a Chinese GPT-2": GPT2
    | {"gradient_checkpointing": False, "n_inner": None, "output_past": True, "scale_attn_weights": True}
    | {"tokenizer_class": "BertTokenizer"},
    "BLOOM": {
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["BloomForCausalLM"],
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "hidden_dropout": 0.0,
        "layer_norm_epsilon": 1e-5,
        "masked_softmax_fusion": True,
        "model_type": "bloom",
        "n_embed": 64,
        "n_inner": None,
        "n_layer": 2,
        "num_attention_heads": 4,
        "offset_alibi": 100,
        "pad_token_id": 3,
        "pretraining_tp": 4,
        "seq_length": 2048,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "unk_token_id": 0,
        "vocab_size": 320,
    },
    "T5": T5
    | {"n_positions": 512, "output_past": True}
    | {"task_specific_params": {"summarization": {"early_stopping": True, "num_beams": 4, "prefix": "summarize: "}}},
    "Flan-T5": T5
    | {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True, "num_decoder_layers": 2}
    | {"tie_word_embeddings": False, "relative_attention_max_distance": 128, "classifier_dropout": 0.0},
    "mT5": T5
    | {"model_type": "mt5", "feed_forward_proj": "gated-gelu", "tokenizer_class": "T5Tokenizer"}
    | {"tie_word_embeddings": False},
    "GLM-4": LATER_LLAMA
    | {"model_type": "glm", "attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5}
    | {"eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329},
    "ChatGLM3": CHATGLM,
    "GLM-4 9B chat": CHATGLM
    | {"attn_implementation": "sdpa", "classifier_dropout": None, "num_hidden_layers": 2, "rope_ratio": 500}
    | {"eos_token_id": [151329, 151336, 151338], "pre_seq_len": None, "prefix_projection": False},
    "ViT": {
        "architectures": ["ViTForImageClassification"],
        "attention_probs_dropout_prob": 0.0,
        "encoder_stride": 16,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": 64,
        "id2label": {"0": "a", "1": "b"},
        "image_size": 32,
        "intermediate_size": 128,
        "label2id": {"a": 0, "b": 1},
        "layer_norm_eps": 1e-12,
        "model_type": "vit",
        "num_attention_heads": 4,
        "num_channels": 3,
        "num_hidden_layers": 2,
        "patch_size": 16,
        "pooler_act": "tanh",
        "pooler_output_size": 64,
        "problem_type": "single_label_classification",
        "qkv_bias": True,
        "torch_dtype": "float32",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_file_with_all_that_publishers_write_is_read(name: str) -> None:
    values = PUBLISHED[name]
    config: Any = converter_of_type(values["model_type"]).read_config(values)
    assert (config.dim, config.num_layers) == (64, 2)
