"""DeepSeek-V3 and R1 (arXiv 2412.19437)."""
