"""The training loop: it knows tasks, never what they are about."""
