"""The operation `grouped_linear`."""
