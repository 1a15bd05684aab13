"""The operation `attention`."""
