"""One folder a room, as in the package, and a few that look at the whole."""
