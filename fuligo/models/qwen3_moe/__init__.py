"""Qwen3, mixture of experts (arXiv 2505.09388)."""
