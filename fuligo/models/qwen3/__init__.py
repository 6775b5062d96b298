"""Qwen3, dense (arXiv 2505.09388)."""
