"""The operation `unique`."""
