"""Vision-language models: their images as pixels, the positions of image tokens, and the forward pass with the vision tower."""
