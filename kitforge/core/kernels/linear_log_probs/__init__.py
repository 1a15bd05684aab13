"""The operation `linear_log_probs`."""
