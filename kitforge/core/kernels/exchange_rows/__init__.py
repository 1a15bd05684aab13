"""The operation `exchange_rows`."""
