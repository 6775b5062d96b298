"""MB/s and peak memory of `fuligo convert fp8`, compared with a plain copy of the same checkpoint.

    python benchmarks/fp8_conversion.py [--megabytes 800] [--files 4] [--workers 1 2] [--repeats 2] [--directory DIR]

The checkpoint has the matrices of a 4B-class Qwen3 in bf16, with as many layers as fit. Copy and conversions alternate, each in its own
process, which ends when its files are on disk; the page cache is warm for all. A conversion reads its source twice and its result once,
because it verifies its output. MB/s refer to the source, by wall time and by CPU time on all cores, which other work affects less; both
start after the import of torch. Memory is the largest resident set of the process; the first line shows that of a process with only torch.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, HEAD, HEADS, KV_HEADS, VOCABULARY = 2560, 9728, 128, 32, 8, 32768
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
COPY = "shutil.copytree(*sys.argv[1:]); os.sync()"
CONVERT = "assert main(['convert', 'fp8', *sys.argv[1:]]) == 0"
IDLE = "pass"
MEASURED = """
import os, shutil, sys, time, torch
from fuligo.cli import main
wall, cpu = time.perf_counter(), time.process_time()
{program}
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))
print(f'\\n{{wall}} {{cpu}} {{peak}}')
"""
"""Code that runs `program` and prints wall time, CPU time and peak resident set (KiB) of its process; `ru_maxrss` would include that of the
process that started it."""


class Usage(NamedTuple):
    """Resources that a process used."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=800, help="approximate size of the checkpoint")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="working directory (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as work:
        source, target = Path(work) / "bf16", Path(work) / "target"
        num_bytes = write_checkpoint(source, options.megabytes * 10**6, options.files)
        convert = [CONVERT, "--model-dir", str(source), "--save-dir", str(target)]
        programs = {"copy": [COPY, str(source), str(target)]}
        programs |= {f"{n} worker{'s' * (n > 1)}": [*convert, "--max-workers", str(n)] for n in options.workers}
        programs |= {f"{strategy}, 1 worker": [*convert, "--strategy", strategy] for strategy in ("channel", "tensor")}
        idle = run([IDLE])
        best: dict[str, Usage] = {}
        for _ in range(options.repeats):
            for name, arguments in programs.items():
                shutil.rmtree(target, ignore_errors=True)
                usage = run(arguments)
                best[name] = min(best.get(name, usage), usage)
    print(f"{num_bytes / 1e6:.0f} MB in {options.files} files of {num_bytes / options.files / 1e6:.0f} MB")
    print(f"{'import torch':<20} {'':>51} {idle.peak_bytes / 1e6:6.0f} MB")
    for name, usage in best.items():
        wall, cpu = (num_bytes / 1e6 / seconds for seconds in (usage.wall_s, usage.cpu_s))
        print(f"{name:<20} {usage.wall_s:7.2f} s {wall:6.0f} MB/s {cpu:6.0f} MB per CPU second {usage.peak_bytes / 1e6:6.0f} MB")


def write_checkpoint(directory: Path, num_bytes: int, num_files: int) -> int:
    """Write the checkpoint and return the size of its tensors in bytes."""
    directory.mkdir()
    layer_bytes = sum(2 * rows * columns for rows, columns in SHAPES.values())
    num_layers = max(num_files, num_bytes // layer_bytes)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    total = 0
    for file in range(num_files):
        tensors = {
            f"model.layers.{layer}.{name}.weight": (torch.randn(shape, generator=generator) * 0.02).bfloat16()
            for layer in range(file, num_layers, num_files)
            for name, shape in SHAPES.items()
        }
        shard = f"model-{file + 1:05d}-of-{num_files:05d}.safetensors"
        save_file(tensors, directory / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "head_dim": HEAD, "vocab_size": VOCABULARY}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": num_layers}
    config |= {"max_position_embeddings": 4096}
    (directory / "config.json").write_text(json.dumps(config))
    return total


def run(program: list[str]) -> Usage:
    """Run a Python process and return its resource usage.

    Args:
        program: code and arguments.
    """
    code, *arguments = program
    command = [sys.executable, "-c", MEASURED.format(program=code), *arguments]
    shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    wall_s, cpu_s, kibibytes = shown.splitlines()[-1].split()
    return Usage(float(wall_s), float(cpu_s), int(kibibytes) * 1024)


if __name__ == "__main__":
    main()
