"""The operation `token_blocks`."""
