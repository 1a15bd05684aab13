"""The arithmetic of alignment as pure functions of tensors: no network, no options, no ranks."""
