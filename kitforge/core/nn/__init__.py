"""Layers that every family of networks is built from."""
