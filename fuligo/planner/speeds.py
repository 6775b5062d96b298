"""Measured efficiencies relative to published speeds, each with its source."""

PEAK_MEASURED_ON = 989.4e12
"""FLOP/s in the H200's data sheet, the base of the fractions below."""
DENSE_ONE_GPU = 491e12 / PEAK_MEASURED_ON
"""The Megatron trainer on an H200: Qwen3-4B, packed rows of 10.7k tokens (docs/benchmarks-gpu.md, like the following)."""
WITH_TP = 405 / 469
"""Factor of TP 2 with sequence parallelism, per GPU, against one GPU with the same code; likewise below."""
WITH_CP = 395 / 469
"""Factor of CP 2."""
WITH_PP = 343 / (9 / 10) / 469
"""Factor of PP 2 with nine micro-batches, without the bubble of a tenth."""
WITH_EXPERTS = 263 / 469
"""GLM-4.7-Flash's shape, 64 experts, on one GPU: grouped products of small matrices."""
WITH_EP = 195 / 405 / WITH_EXPERTS
"""Factor of TP 2 and EP 2: exchange of tokens within a node. (128 experts with EP 2 alone: 256 / 272.)"""
TORCH_TRAINER = 6 * 0.6e9 * 40e3 / PEAK_MEASURED_ON
"""The torch trainer on an H200: Qwen3 of 0.6B, 40k tokens/s with forward, backward and AdamW (docs/benchmarks-gpu.md)."""
PREFILL = DENSE_ONE_GPU
"""Efficiency of an engine's prefill, assumed equal to a dense trainer's."""

DECODE_BANDWIDTH = 0.39
DECODE_LAYER_S = 42e-6
"""A decoding step of SGLang 0.5.15 on an H200: bytes read / (this share of the bandwidth) + this time for each layer. Fitted to two
measurements of a 28-layer 0.6B model, 64 + 512 tokens: 20.7k tokens/s at 64 requests, 37.6k at 256."""
EMBEDDED_LAYER_S = 1.1e-3
"""Time per layer in the embedded engine, which has no CUDA graphs: 8.5k tokens/s at 256 requests of that model (docs/benchmarks-gpu.md)."""
DRAFT_ACCEPTANCE = 0.85
"""Acceptance rate of each drafted token, given those before it: the lower figure for DeepSeek-V3's MTP layer (arXiv 2412.19437, section
5.4.3)."""

SYNC_BYTES_PER_S = 12e9
"""Weight sync through CUDA IPC on an H200: 1.2 GB in 0.10 s (docs/benchmarks-gpu.md). Each GPU of an engine receives every tensor."""
HOST_ADAM_BYTES_PER_S = 300e9
"""Memory traffic of Adam on a node's CPUs: half of two sockets with eight channels of DDR5-4800 (614 GB/s)."""
ADAM_TRAFFIC_BYTES = 28
"""Memory traffic per parameter update: weight, gradient and moments read (16), weight and moments written (12)."""
