"""`paged_attention`: attention of single tokens over a paged KV cache."""
