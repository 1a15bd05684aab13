"""The operation `keep_mask`: which elements dropout keeps."""
