"""Tables that are only read: over a checkpoint's files as they are, or over smaller ones made from them."""
