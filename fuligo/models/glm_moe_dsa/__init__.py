"""GLM-5: mixture of experts, latent attention, sparse attention with shared indices (arXiv 2603.12201)."""
