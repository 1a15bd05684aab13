"""The operation `moe_permute`."""
