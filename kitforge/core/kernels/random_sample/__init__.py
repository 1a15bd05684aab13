"""The operation `random_sample`."""
