"""The operation `fused_decode_step`."""
