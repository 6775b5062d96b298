"""The trainer on Megatron-Core."""

import warnings

# At every import Megatron warns of missing packages and of its own defaults, and torch of deprecated names that Megatron calls.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
