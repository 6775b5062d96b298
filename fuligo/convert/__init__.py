"""Checkpoints from one format to another: what a conversion would do. Imports no torch."""
