"""Assets of `fuligo quickstart`: a tiny warm-start model, prompts, a configuration."""
