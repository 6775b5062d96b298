"""Compile the kernels of `fuligo_kernels` for a Hopper GPU with a compiler that does nothing; print problems and names as JSON.

    python kernel_names.py AHEAD KERNELS

Runs in SGLang's interpreter. AHEAD is the directory of `fuligo_kernels`, KERNELS the kernels as JSON.
"""

import json
import sys
from typing import Any

import tvm_ffi.cpp

sys.path.append(sys.argv[1])
import fuligo_kernels

names: list[str] = []


def load_inline(name: str, **_: Any) -> object:
    names.append(name.rpartition("_")[0])  # without the digest of its source
    return object()


tvm_ffi.cpp.load_inline = load_inline
kernels = [(module, function, tuple(arguments)) for module, function, arguments in json.loads(sys.argv[2])]
print(json.dumps([list(fuligo_kernels._compiled(kernels, (9, 0))), sorted(names)]))
