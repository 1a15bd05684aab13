"""Deep Interest Network."""
