"""OpenAI-compatible HTTP server of an engine."""
