"""Equality of mathematical answers as people write them. It imports nothing else from fuligo, and sympy only in `algebra`."""
