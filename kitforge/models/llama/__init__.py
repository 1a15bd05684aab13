"""LLaMA 1 to 3, and its close relatives Mistral, Qwen2 and Qwen3."""
