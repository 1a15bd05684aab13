"""The operation `likeliest`."""
