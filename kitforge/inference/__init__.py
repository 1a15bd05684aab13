"""Running trained networks: the attention cache, sampling and the decoding loop."""
