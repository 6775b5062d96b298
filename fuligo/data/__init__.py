"""Prompt files: random access to rows, chat templates, and an order that a resumed run continues exactly."""
