"""The command line: one file a verb, and what they share."""
