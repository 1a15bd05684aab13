"""Labelled images: where they lie, and their pixels."""
