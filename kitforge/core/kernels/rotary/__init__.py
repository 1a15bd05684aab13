"""The operation `rotary`."""
