"""The operation `move_rows`."""
