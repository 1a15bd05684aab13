"""Families of networks, one folder each; `catalog.py` lists them."""
