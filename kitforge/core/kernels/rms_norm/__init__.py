"""The operation `rms_norm`."""
