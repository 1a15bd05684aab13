"""The operation `gather_pool`."""
