"""The operation `segment_sum`."""
