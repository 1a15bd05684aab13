"""Mixtral of Mistral AI."""
