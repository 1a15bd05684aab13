"""DCN V2."""
