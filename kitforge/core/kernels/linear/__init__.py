"""The operation `linear`."""
