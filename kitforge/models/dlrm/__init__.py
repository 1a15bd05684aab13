"""DLRM."""
