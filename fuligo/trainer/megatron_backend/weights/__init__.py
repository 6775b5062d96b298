"""Conversion of weights between Hugging Face checkpoints and Megatron's models, for any layout."""
