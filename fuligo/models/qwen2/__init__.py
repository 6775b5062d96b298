"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115)."""
