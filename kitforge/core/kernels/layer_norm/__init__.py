"""The operation `layer_norm`."""
