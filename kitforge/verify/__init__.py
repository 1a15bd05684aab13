"""The contracts of training as a command: each is checked on the caller's configuration, data and device."""
