"""The operation `decode_attention`."""
