"""One program on one process or many: axes, sharding, collectives. At world size 1 nothing in here does any work."""
