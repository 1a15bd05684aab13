"""DeepFM."""
