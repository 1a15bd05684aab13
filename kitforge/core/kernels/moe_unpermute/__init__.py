"""The operation `moe_unpermute`."""
