"""Import of launch scripts: bash runs the script in a sandbox, and stand-ins record the training job that it starts."""
