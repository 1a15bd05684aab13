"""From documents to rows of tokens: token cache, packing, streams, continuations."""
