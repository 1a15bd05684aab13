"""Domain kits: where the rooms below meet. Kits do not know one another."""
