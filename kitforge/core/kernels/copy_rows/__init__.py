"""The operation `copy_rows`."""
