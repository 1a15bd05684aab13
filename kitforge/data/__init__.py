"""Text in, rows of tokens out: sources, tokenizers, the token cache, packing, order, prefetch. Knows no model."""
