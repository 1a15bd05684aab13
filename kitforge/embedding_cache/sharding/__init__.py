"""How the rows of a table lie on several ranks, and who chooses."""
