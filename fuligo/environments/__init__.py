"""Environments for training, and the exact rendering of their conversations."""
