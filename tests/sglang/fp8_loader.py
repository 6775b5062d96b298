"""Load FP8 checkpoints with SGLang's own classes, in SGLang's interpreter, up to the kernels that a CPU lacks.

    python fp8_loader.py SERVED NEXT [SERVED NEXT ...]

Builds SGLang's model of each SERVED directory, loads its weights, then those of NEXT in their place, as an update of a running engine
does. Prints a line of JSON for each: the model's class, the quantization that SGLang found, and for both loads which parameters nothing
was loaded into and whether the FP8 values and the scales in the model are those of the files.
"""

import json
import socket
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.model_loader.utils import get_model_architecture
from sglang.srt.model_loader.weight_utils import get_quant_config
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

FP8 = torch.float8_e4m3fn
NOT_A_NUMBER = 0x7F
"""FP8 pattern that a conversion never writes."""
UNSET = -12345.0
CACHE_SCALES = ("k_scale", "v_scale")
"""Scales of an FP8 cache, which these checkpoints lack."""


def server_args(model: str) -> ServerArgs:
    return ServerArgs(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
    )


def start(args: ServerArgs) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    set_global_server_args_for_scheduler(args)
    init_distributed_environment(backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=address)
    initialize_model_parallel(1)
    initialize_moe_config(args)
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # compressed-tensors asks for it before any kernel is chosen


def tensors_of(directory: str) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(Path(directory).glob("*.safetensors")) for name, tensor in load_file(file).items()}


def byte_counts(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Count each FP8 pattern, which is the same however the model joins the matrices."""
    return sum(
        (torch.bincount(tensor.view(torch.uint8).flatten(), minlength=256) for tensor in tensors), torch.zeros(256, dtype=torch.long)
    )


def sorted_numbers(tensors: list[torch.Tensor]) -> list[float]:
    return sorted(number for tensor in tensors for number in tensor.flatten().tolist())


@torch.no_grad()
def load(model: torch.nn.Module, directory: str) -> dict[str, object]:
    parameters = {name: parameter for name, parameter in model.named_parameters() if not name.endswith(CACHE_SCALES)}
    for parameter in parameters.values():
        if parameter.dtype == FP8:
            parameter.view(torch.uint8).fill_(NOT_A_NUMBER)
        else:
            parameter.fill_(UNSET)
    files = tensors_of(directory)
    model.load_weights(iter(files.items()))
    unset = {name: (p.view(torch.uint8) == NOT_A_NUMBER) if p.dtype == FP8 else p == UNSET for name, p in parameters.items()}
    padding = ("embed_tokens.weight", "lm_head.weight")
    loaded = [[p for p in parameters.values() if p.dtype == FP8], [p for name, p in parameters.items() if "weight_scale" in name]]
    stored = [[t for t in files.values() if t.dtype == FP8], [t for name, t in files.items() if "weight_scale" in name]]
    return {
        "unset": [name for name, where in unset.items() if bool(where.any()) and not name.endswith(padding)],
        "values": torch.equal(byte_counts(loaded[0]), byte_counts(stored[0])),
        "scales": sorted_numbers(loaded[1]) == sorted_numbers(stored[1]),
    }


def main(directories: list[str]) -> None:
    start(server_args(directories[0]))
    for served, following in zip(directories[::2], directories[1::2], strict=True):
        args = server_args(served)
        set_global_server_args_for_scheduler(args)
        config = ModelConfig.from_server_args(args)
        initialize_dp_attention(server_args=args, model_config=config)
        model_class, _ = get_model_architecture(config)
        quantization = get_quant_config(config, LoadConfig(), getattr(model_class, "packed_modules_mapping", {}))
        torch.set_default_dtype(torch.bfloat16)
        model = _initialize_model(config, LoadConfig(), quantization)
        torch.set_default_dtype(torch.float32)
        loads = [load(model, directory) for directory in (served, following)]
        print(json.dumps({"class": model_class.__name__, "quantization": config.quantization, "loads": loads}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
