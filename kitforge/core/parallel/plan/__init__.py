"""Plans of a run before it starts: the memory of a rank, traced from its own step."""
