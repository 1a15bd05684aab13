"""The operation `swiglu`."""
