"""The operation `read_rows`."""
