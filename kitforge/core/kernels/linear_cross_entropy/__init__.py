"""The operation `linear_cross_entropy`."""
