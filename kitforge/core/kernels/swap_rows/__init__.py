"""The operation `swap_rows`."""
