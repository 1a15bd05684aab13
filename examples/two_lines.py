"""Two lines train a language model on what every machine has: the sources of Python's standard library.

Leave `options` out for a whole pass over them, about five thousand steps.
"""

from kitforge import Trainer

SHORT = {"trainer.max_steps": 30, "data.validation": 0.005, "data.sequence_length": 128}
Trainer("text_generation", "llama_tiny", "python_stdlib", options=SHORT).train()
