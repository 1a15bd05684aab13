"""Qwen3 with a mixture of experts, of the Qwen team."""
