"""Kimi K2 and K2 Thinking, text (arXiv 2507.20534): DeepSeek-V3's layers with more experts, fewer heads, and one dense layer.

transformers 5.12.1 has no classes for `kimi_k2`; its DeepSeek-V3 classes load the checkpoints, as SGLang 0.5.15.post1's do.
"""

from dataclasses import replace

from fuligo.models.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, loaded_as="deepseek_v3")
