"""The peer's side of `ppo.py`, for an environment of its own: trl==1.12.0, the last release that has PPO."""

import json
import os
import sys
import tempfile
import time
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

epochs, episodes, response, vocab = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), 1024
torch.set_num_threads(1)
words = {f"w{number}": number for number in range(vocab - 2)} | {"<eos>": vocab - 2, "<pad>": vocab - 1}
pieces = Tokenizer(models.WordLevel(words, unk_token="w0"))
pieces.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<eos>", pad_token="<pad>", padding_side="left")
shape: dict[str, Any] = {"vocab_size": vocab, "n_positions": 512, "n_embd": 256, "n_layer": 4, "n_head": 4}
config = GPT2Config(**shape, bos_token_id=vocab - 2, eos_token_id=vocab - 2, pad_token_id=vocab - 1)
torch.manual_seed(0)
policy, reference = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
reference.load_state_dict(policy.state_dict())
scalar = GPT2Config(**{**config.to_dict(), "num_labels": 1})
noise = torch.Generator().manual_seed(0)
lengths = torch.randint(16, 65, (episodes,), generator=noise).tolist()
rows = [{"input_ids": torch.randint(0, vocab - 2, (length,), generator=noise).tolist()} for length in lengths]
generating, began, calls = 0.0, 0.0, 0
generate = ppo_trainer.batch_generation


def timed(*given, **named):
    """The peer's own generation, with its time taken."""
    global began, generating, calls
    begun = time.process_time()
    calls += 1
    # The first round does not count, on either side.
    if calls == 2:
        began, generating = begun, 0.0
    found = generate(*given, **named)
    generating += time.process_time() - begun
    return found


ppo_trainer.batch_generation = timed
trainer = PPOTrainer(
    args=PPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=32,
        gradient_accumulation_steps=1,
        total_episodes=episodes,
        response_length=response,
        num_ppo_epochs=epochs,
        num_mini_batches=1,
        num_sample_generations=0,
        local_rollout_forward_batch_size=32,
        temperature=0.7,
        use_cpu=True,
        bf16=sys.argv[4] == "bf16",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
    ),
    processing_class=tokenizer,
    model=policy,
    ref_model=reference,
    reward_model=GPT2ForSequenceClassification(scalar),
    value_model=GPT2ForSequenceClassification(scalar),
    train_dataset=Dataset.from_list(rows),
    eval_dataset=Dataset.from_list(rows[:4]),
)
trainer.train()
# From the second round on, as ours is taken.
taken = time.process_time() - began
print("RESULT", json.dumps({"seconds": taken, "generating": generating, "episodes": episodes - 32}))
