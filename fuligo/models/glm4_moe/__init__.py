"""GLM-4.5, GLM-4.6 and GLM-4.7, mixture of experts (arXiv 2508.06471)."""
