"""Equality of mathematical answers as people write them. The package imports nothing else from fuligo, and sympy only in `algebra`."""
