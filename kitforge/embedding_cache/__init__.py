"""Embedding tables larger than any one memory: rows move between tiers, and nobody who computes can tell."""
