"""The operation `quantized_linear`."""
