"""Vision-language models: image preprocessing, positions of image tokens, and the forward pass with the vision tower."""
