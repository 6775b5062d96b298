"""Weights between Hugging Face checkpoints and Megatron's models, whatever the layout."""
