"""The operation `geglu`."""
