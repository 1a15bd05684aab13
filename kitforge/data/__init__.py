"""From text to rows of tokens: sources, tokenizers, token cache, packing, sample order, prefetching."""
