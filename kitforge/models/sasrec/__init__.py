"""SASRec."""
