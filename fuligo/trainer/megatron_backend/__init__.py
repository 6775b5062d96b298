"""Trainer backend on Megatron-Core."""

import warnings

# At every import, Megatron warns about missing packages and its defaults, and torch about deprecated names that Megatron calls.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
