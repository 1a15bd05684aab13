"""Tokenizers of every kind of file, and the settings beside a vocabulary."""
