"""The ground floor: errors, configuration, devices, seeds, files. It knows no word of any domain."""
