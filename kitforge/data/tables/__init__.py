"""Tables: readers, columns of numbers and keys, the column cache, a synthetic click log."""
