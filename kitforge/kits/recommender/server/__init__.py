"""A recommender over HTTP: scores of rows, items for users, and newer checkpoints while it answers."""
