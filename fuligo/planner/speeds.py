"""Measured efficiencies relative to published speeds, each with its source."""

PEAK_MEASURED_ON = 989.4e12
"""FLOP/s in the H200's data sheet, the base of the fractions below."""
DENSE_ONE_GPU = 491e12 / PEAK_MEASURED_ON
"""Efficiency of the Megatron trainer on an H200: Qwen3-4B, packed rows of 10.7k tokens (source of this and the following figures:
docs/benchmarks-gpu.md)."""
WITH_TP = 405 / 469
"""Throughput per GPU with TP 2 and sequence parallelism, relative to one GPU with the same code; the factors below likewise."""
WITH_CP = 395 / 469
"""Factor of CP 2."""
WITH_PP = 343 / (9 / 10) / 469
"""Factor of PP 2, measured with nine micro-batches and without the pipeline bubble, which is a tenth of the step."""
WITH_EXPERTS = 263 / 469
"""Factor of an MoE model, which computes grouped products of small matrices: GLM-4.7-Flash's shape, 64 experts, on one GPU."""
WITH_EP = 195 / 405 / WITH_EXPERTS
"""Factor of EP 2, measured with TP 2: exchange of tokens within a node. (EP 2 alone, with 128 experts: 256 / 272.)"""
WITH_FP8 = 54_284 / 48_069
"""Speed of training in block-scaled FP8 (--fp8-format) relative to bf16: 12 layers of Qwen3-4B on an H200 (docs/fp8.md)."""
TORCH_TRAINER = 450e12 / PEAK_MEASURED_ON
"""Efficiency of the torch trainer on an H200 with compiled layers, in the same case as the Megatron trainer."""
TORCH_EAGER = 170e12 / PEAK_MEASURED_ON
"""Efficiency of the torch trainer without compiled layers: Qwen3-0.6B, packed rows of 13.3k tokens."""
LAUNCH_EXPERTS_S = 1.14 / 35 / 2
"""Shortest time of a forward or backward pass of a Megatron layer with experts, bound by the CPU's kernel launches. On four H100s
with EP 4, both passes of 7 layers over 5 micro-batches take 1.14 s, and just as long with TP 2, where kernels are half as large
(docs/benchmarks-gpu.md). The two passes are assumed to take equally long."""
LAUNCH_LAYER_S = 5.5e-3 / 2
"""The same for other layers that are not compiled: with SmolLM2 on the torch trainer, both passes of a layer over a row of 8,192 tokens
take 6.7-7.7 ms in one run and 4.5-5.5 ms in another. Assumed for Megatron's dense layers, too."""
LAUNCH_COMPILED_S = 4.8e-3 / 2
"""The same for compiled layers: both passes of a layer over a row of 8,192 tokens take 3.5-4.8 ms with SmolLM2, and 7 ms with Qwen3-0.6B
(of which the FLOPs take 2). This includes GPU time that the FLOPs of such small models do not show."""
PREFILL = DENSE_ONE_GPU
"""Efficiency of an engine's prefill, assumed equal to a dense trainer's."""

DECODE_BANDWIDTH = 0.7
DECODE_LAYER_S = 60e-6
DECODE_REQUEST_S = 5e-6
"""Time of a decoding step of SGLang 0.5.15 with a CUDA graph on an H200: bytes read / (DECODE_BANDWIDTH x bandwidth), DECODE_LAYER_S per
layer, and DECODE_REQUEST_S per request (sampling, log-probabilities, the scheduler). Fitted to Qwen3-4B's shape with 69 to 953 requests,
SmolLM2 with 178 to 1,024, and a 0.6B model with 64 and 256 (docs/benchmarks-gpu.md)."""
EAGER_LAYER_S = 1.1e-3
"""Time per layer without a CUDA graph, in SGLang (512 requests: 33-37 ms for 30 and 36 layers) and in the embedded engine (8.5k tokens/s at
256 requests of a 28-layer model)."""
ARRIVAL_S = 0.9e-3
"""Time per request of a wave through runner, router and tokenizer process: 0.5 ms from one arrival to the next, the rest for the answers
with their log-probabilities, fitted to whole rollouts of SmolLM2 in `fuligo train` (docs/benchmarks-gpu.md)."""
DRAFT_ACCEPTANCE = 0.85
"""Acceptance rate of each drafted token, given those before it: the lower figure for DeepSeek-V3's MTP layer (arXiv 2412.19437, section
5.4.3)."""
SPECULATIVE_STEP_S = 11e-3
"""Time by which speculative decoding lengthens a step of SGLang 0.5.15, mostly CPU work between drafting and verification. Measured in
one run: GLM-4.7-Flash with 8 layers, two drafts, 64 requests per replica, DP attention over four H100s; a step took 15 ms, of which the
other terms explain 4 (docs/benchmarks-gpu.md). It is not known how much of this is due to DP attention."""
KEPT_SHARE = 0.5
"""Share of the groups that a filter keeps: 44 to 62% with SmolLM2 on GSM8K and `check_reward_nonzero_std` (docs/real-runs.md)."""

SYNC_BYTES_PER_S = 12e9
"""Weight sync through CUDA IPC on an H200: 1.2 GB in 0.10 s (docs/benchmarks-gpu.md). Each GPU of an engine receives every tensor."""
HOST_COPY = 0.8
"""Share of the PCIe bandwidth that copies between GPU and pinned host memory reach: 47-55 GB/s of 64 on H200s (docs/benchmarks-gpu.md)."""
HOST_ADAM_BYTES_PER_S = 300e9
"""Assumed memory bandwidth of Adam on a node's CPUs: half the peak of two sockets with eight channels of DDR5-4800 (614 GB/s)."""
HOST_ADAM_RANK_BYTES_PER_S = 46e9
"""Memory bandwidth that Adam reaches on the CPU cores of one rank, copies included. With 16 cores, a step of Qwen3-4B on one H200 took
2.5 s longer than with Adam on the GPU: 73k tokens at 287 and 456 TFLOP/s (docs/benchmarks-gpu.md)."""
ADAM_TRAFFIC_BYTES = 28
"""Memory traffic per parameter update: weight, gradient and moments read (16), weight and moments written (12)."""
