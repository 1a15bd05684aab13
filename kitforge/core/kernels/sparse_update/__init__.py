"""The operation `sparse_update`."""
