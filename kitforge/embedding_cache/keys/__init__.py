"""Keys and slots of a tier."""
