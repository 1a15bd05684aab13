"""Two lines train a language model on what every machine has: the sources of Python's standard library."""

from kitforge import Trainer

Trainer(task="text_generation", model="llama_tiny", train_dataset="python_stdlib").train()
