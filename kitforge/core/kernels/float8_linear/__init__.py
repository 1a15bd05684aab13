"""The operation `float8_linear`."""
