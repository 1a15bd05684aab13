"""What the loops over rows of embedding tables share."""
