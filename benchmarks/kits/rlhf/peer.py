"""What the peer's sides share, for an environment of their own: the network, the words, the clock."""

import json
import os
import tempfile
import time
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

VOCAB = 1024
END, FILLING = VOCAB - 2, VOCAB - 1
torch.set_num_threads(1)


def lists(number, seed, shortest, longest):
    """Lists of random tokens, as `beside.lists` has them."""
    noise = torch.Generator().manual_seed(seed)
    for length in torch.randint(shortest, longest + 1, (number,), generator=noise).tolist():
        yield torch.randint(0, VOCAB - 2, (length,), generator=noise).tolist()


def words(tokens):
    """A text of those tokens."""
    return " ".join(f"w{token}" for token in tokens)


def tokenizer():
    """A word is a token."""
    known = {f"w{number}": number for number in range(END)} | {"<eos>": END, "<pad>": FILLING}
    pieces = Tokenizer(models.WordLevel(known, unk_token="w0"))
    pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<eos>", pad_token="<pad>", padding_side="left")


def network(is_scalar=False):
    """The network of `beside.network`, read from a folder, which the peer wants to find a reference in."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": VOCAB, "n_positions": 512, "n_embd": 256, "n_layer": 4, "n_head": 4}
    ids: dict[str, Any] = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": FILLING}
    if is_scalar:
        return GPT2ForSequenceClassification(GPT2Config(**shape, **(ids | {"num_labels": 1})))
    folder = tempfile.mkdtemp()
    GPT2LMHeadModel(GPT2Config(**shape, **ids)).save_pretrained(folder)
    return GPT2LMHeadModel.from_pretrained(folder)


def options(episodes, precision):
    """What all of the peer's configurations are told."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 32,
        "max_steps": episodes // 32,
        "learning_rate": 3e-6,
        "use_cpu": True,
        "bf16": precision == "bf16",
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }


class Clock(TrainerCallback):
    """From the beginning of the first step that counts to the end of the last."""

    begun = ended = 0.0

    def __init__(self, first, at_first, clock):
        self.first, self.at_first, self.clock = first, at_first, clock

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.first:
            self.begun = self.clock()
            self.at_first()

    def on_step_end(self, args, state, control, **_):
        self.ended = self.clock()


def measure(trainer, generation, episodes, clock=time.process_time):
    """Train, and say what it took and how many episodes count. `generation` names the method that writes answers, if
    there is one: then the first round does not count, on either side."""
    found, first = {}, 0
    if generation is not None:
        generate, found["generating"], first = getattr(trainer, generation), 0.0, 1

        def timed(*given, **named):
            begun = clock()
            answers = generate(*given, **named)
            found["generating"] += clock() - begun
            return answers

        setattr(trainer, generation, timed)
    whole = Clock(first, lambda: found.update(dict.fromkeys(found, 0.0)), clock)
    trainer.add_callback(whole)
    trainer.train()
    print("RESULT", json.dumps({**found, "episodes": episodes, "seconds": whole.ended - whole.begun}))
