"""Equality of mathematical answers as people write them. A leaf: it imports nothing of fuligo, and sympy only where algebra decides."""
