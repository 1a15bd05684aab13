"""The recommender kit: features, tables of embeddings, click and retrieval models, their metrics."""
