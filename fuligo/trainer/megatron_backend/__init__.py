"""The trainer on Megatron-Core."""

import warnings

# It warns of packages that are not there and of its own defaults at every import, and torch of names that it still calls.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
