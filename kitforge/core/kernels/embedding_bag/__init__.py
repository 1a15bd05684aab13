"""The operation `embedding_bag`."""
