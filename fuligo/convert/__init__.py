"""Conversions between checkpoint formats, and their comparison."""
