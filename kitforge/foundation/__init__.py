"""Domain-free basics: errors, configuration, devices, seeds, files, logging."""
