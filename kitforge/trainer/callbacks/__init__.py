"""What watches a run and acts at its events, one file each."""
