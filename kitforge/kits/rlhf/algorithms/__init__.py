"""The algorithms as pure functions of tensors: no models, no options of a task, no ranks."""
