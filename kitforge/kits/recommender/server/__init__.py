"""The HTTP server of the recommender: scoring, retrieval, and refresh from newer checkpoints."""
