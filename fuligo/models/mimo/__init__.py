"""MiMo-7B (arXiv 2505.07608)."""
