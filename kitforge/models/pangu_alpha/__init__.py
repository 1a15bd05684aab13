"""PanGu-alpha."""
