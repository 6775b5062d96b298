"""Compile the batch-invariant kernels, and those that draw tokens, for Hopper GPUs, without one; exit with an error if that fails.

For an interpreter with triton, such as SGLang's.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "fuligo" / "engines" / "sglang" / "sampler"))
import fuligo_draw

from fuligo.models import invariant_expert_kernels, invariant_kernels

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
"""Shared memory of a program, at most."""


def compiled(kernel: Any, arguments: Mapping[str, str], constants: Mapping[str, Any], **options: Any) -> str:
    """Return the kernel's PTX. Pointers and sizes are multiples of 16, as those of weights are."""
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if arguments.get(name, "").startswith("*")
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    found = triton.compile(ASTSource(kernel, signature, values, aligned), target=HOPPER, options=options)
    assert found.metadata.shared <= SHARED_BYTES, (kernel, constants)
    return found.asm["ptx"]


def typed(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def check_products() -> None:
    """All tiles sum 16 inputs of 64 rows per instruction; only the number of columns differs."""
    linear = typed("i32", "num_rows num_outputs num_inputs num_programs") | {"bias": "*bf16"}
    grouped = typed("i32", "num_outputs num_inputs num_experts") | {"starts": "*i32"}
    tiles = {invariant_kernels._tile(rows, dtype) for rows in (1, 65, 385, 1024) for dtype in (torch.float32, torch.bfloat16)}
    ways = [(invariant_kernels._linear_kernel, tile, "x", linear, {"HAS_BIAS": True}) for tile in tiles]
    tiles = {invariant_expert_kernels._tile(rows) for rows in (1, 64, 512)}
    ways += [(invariant_expert_kernels._grouped_linear_kernel, tile, "rows", grouped, {"EXPERTS": 256}) for tile in tiles]
    for kernel, tile, rows, arguments, constants in ways:
        shapes = {rows: f"tensordesc<bf16[{tile.rows},{tile.inputs}]>", "weight": f"tensordesc<bf16[{tile.columns},{tile.inputs}]>"}
        sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "INPUTS": tile.inputs, "GROUPED": 8}
        ptx = compiled(kernel, arguments | shapes | {"out": "*bf16"}, constants | sizes, num_warps=tile.warps, num_stages=tile.stages)
        instructions = set(re.findall(r"wgmma\.mma_async\S+", ptx))
        assert instructions and all(re.fullmatch(r".*\.m64n\d+k16\.f32\.bf16\.bf16", each) for each in instructions), instructions
        assert "cp.async.bulk.tensor" in ptx


def check_routing() -> None:
    each = {"logits": "*bf16", "weights": "*fp32", "chosen": "*i32", "num_experts": "i32"}
    for experts, top_k, slots in ((32, 3, 4), (128, 8, 8), (512, 1, 1)):
        sizes = {"TOP_K": top_k, "RENORMALIZE": True, "EXPERTS": experts, "SLOTS": slots}
        compiled(invariant_expert_kernels._route_kernel, each, sizes, num_warps=1, enable_fp_fusion=False)
    choices = typed("*i32", "chosen starts tokens places") | typed("i32", "num_choices num_experts")
    compiled(invariant_expert_kernels._sort_kernel, choices, {"TOP_K": 8, "OWN": 64, "OTHERS": 128}, num_warps=4)
    rows = {"rows": "*bf16", "places": "*i32", "weights": "*fp32", "out": "*bf16", "num_columns": "i32"}
    compiled(invariant_expert_kernels._combine_kernel, rows, {"TOP_K": 8, "COLUMNS": 1024}, num_warps=4, enable_fp_fusion=False)


def check_draws() -> None:
    each = (
        typed("*fp32", "logits temperatures sums logprobs") | typed("*i32", "chosen tokens") | typed("i32", "stride num_logits num_parts")
    )
    compiled(fuligo_draw._draw_parts, each | {"seed": "*i64"}, {"LOGITS": fuligo_draw.LOGITS}, num_warps=8)
    compiled(fuligo_draw._combine, each, {"PARTS": 64})


check_products()
check_routing()
check_draws()
