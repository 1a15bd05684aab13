"""Rows of tables: readers, columns of numbers and keys, the column cache, a click log made up. Knows no features."""
