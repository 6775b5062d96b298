"""Conversion of weights between Hugging Face checkpoints and Megatron models, for any layout."""
