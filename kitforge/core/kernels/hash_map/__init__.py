"""The operation `hash_map`."""
