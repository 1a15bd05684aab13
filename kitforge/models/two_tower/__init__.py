"""Two towers."""
