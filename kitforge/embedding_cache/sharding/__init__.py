"""Sharding of embedding tables over ranks: row-wise, column-wise, table-wise, replicated, and a planner."""
