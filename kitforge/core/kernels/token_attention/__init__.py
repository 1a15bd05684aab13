"""The operation `token_attention`."""
