"""A GGUF file of a LLaMA with random weights, in any type of the package gguf."""

from pathlib import Path

import gguf
import numpy as np


def write_random(path: Path, shape: dict[str, int], name: str) -> None:
    """Write a LLaMA of the shape; matrices in the tensor type, norms in fp32."""
    dim, layers, heads, mlp = (shape[key] for key in ("dim", "num_layers", "num_heads", "mlp_dim"))
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape["max_length"])
    writer.add_embedding_length(dim)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(dim // heads)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    noise, kind = np.random.default_rng(0), gguf.GGMLQuantizationType[name]

    def matrix(key: str, rows: int, columns: int) -> None:
        values = noise.standard_normal((rows, columns), dtype=np.float32) * 0.02
        writer.add_tensor(f"{key}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(key: str) -> None:
        writer.add_tensor(f"{key}.weight", np.ones(dim, np.float32))

    matrix("token_embd", shape["vocab_size"], dim)
    for layer in range(layers):
        for each in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{each}", dim, dim)
        matrix(f"blk.{layer}.ffn_gate", mlp, dim)
        matrix(f"blk.{layer}.ffn_up", mlp, dim)
        matrix(f"blk.{layer}.ffn_down", dim, mlp)
        norm(f"blk.{layer}.attn_norm")
        norm(f"blk.{layer}.ffn_norm")
    norm("output_norm")
    matrix("output", shape["vocab_size"], dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
