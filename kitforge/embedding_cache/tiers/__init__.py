"""The kinds of memory in which rows live, one file each."""
