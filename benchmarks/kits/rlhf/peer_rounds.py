"""The peer's side of `rounds.py`, for an environment of its own: trl==1.12.0 and requests."""

import json
import sys
import tempfile

import peer
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

told = json.loads(sys.argv[1])
shape, count = told["shape"], told["prompts"] * told["answers"]
torch.set_num_threads(told["threads"])
end, filling = shape["vocab_size"] - 2, shape["vocab_size"] - 1


def distinct(completion_ids, **_):
    """The share of tokens that are new."""
    return [len(set(tokens)) / max(len(tokens), 1) for tokens in completion_ids]


def network():
    """The network of `rounds.py`, read from a folder, which the peer wants to find a reference in."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape["dim"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        intermediate_size=shape["mlp_dim"],
        vocab_size=shape["vocab_size"],
        max_position_embeddings=shape["max_length"],
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=filling,
    )
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tokenizer():
    """A word is a token."""
    known = {f"w{number}": number for number in range(end)} | {"<eos>": end, "<pad>": filling}
    pieces = Tokenizer(models.WordLevel(known, unk_token="w0"))
    pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<eos>", pad_token="<pad>", padding_side="left")


steps = told["rounds"] + 1
options = peer.options(32 * steps, told["precision"])
# A quarter of a round at a time: logits of all its tokens at once take most of the memory.
options |= {"per_device_train_batch_size": count // 4, "gradient_accumulation_steps": 4}
rows = [{"prompt": peer.words(tokens)} for tokens in peer.lists(told["prompts"] * steps, 0, 16, 64)]
trainer = GRPOTrainer(
    model=network(),
    reward_funcs=distinct,
    args=GRPOConfig(**options, num_generations=told["answers"], max_completion_length=told["new"], beta=0.04),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer(),
)
peer.measure(trainer, "_generate", told["rounds"], clock=peer.time.perf_counter)
