"""The roles of RLHF: loading of models, reference model, value head, rewards, and their placement on ranks."""
