"""How long a test waits for what must come: a last resort, so that a busy machine fails no test."""

PATIENCE = 900.0  # seconds
