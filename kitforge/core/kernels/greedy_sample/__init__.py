"""The operation `greedy_sample`."""
