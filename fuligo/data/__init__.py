"""Prompt files: random access to rows, chat template, order and its exact resume."""
