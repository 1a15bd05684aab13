"""Keys of a tier: their slots, their admission and their initial rows."""
