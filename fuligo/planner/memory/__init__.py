"""Peak memory of every kind of GPU, and of the host."""
