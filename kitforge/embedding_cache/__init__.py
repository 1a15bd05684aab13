"""Embedding tables larger than device memory: rows move between memory tiers; results equal an uncached table's."""
