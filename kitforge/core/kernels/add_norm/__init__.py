"""The operation `add_norm`."""
