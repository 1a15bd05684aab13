"""The operation `pread_rows`."""
