"""GLM-4.7-Flash: mixture of experts with latent attention."""
