"""Kitforge: training kits for PyTorch."""
