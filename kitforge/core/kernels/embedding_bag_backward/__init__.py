"""The operation `embedding_bag_backward`."""
