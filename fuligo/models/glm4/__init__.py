"""GLM-4-0414 and GLM-Z1, dense."""
