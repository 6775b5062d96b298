"""Load weights under the names that the trainer sends into SGLang's own classes, in SGLang's interpreter; nothing is computed.

    python sent_loader.py DIRECTORY [DIRECTORY ...]

Builds SGLang's model of each directory and loads `sent/*.safetensors` below it as a stream of small buckets. Prints a line of JSON for
each: the model's class, the parameters into which nothing was loaded, and the number of calls of `load_weights`.
"""

import json
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fp8_loader import UNSET, start, tensors_of
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.model_loader.utils import get_model_architecture
from sglang.srt.models.deepseek_common import deepseek_weight_loader
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from torch.distributed import HashStore

sys.path.append(str(Path(__file__).parents[2] / "fuligo/engines/sglang/sync"))
from fuligo_sync import Stream

PADDED = ("embed_tokens.weight", "lm_head.weight", "embed_tokens_per_layer.weight")


def server_args(model: str) -> ServerArgs:
    """Return arguments for a CPU with an attention backend of GPUs, which some models insist on."""
    return ServerArgs(
        model_path=model,
        device="cpu",
        attention_backend=BACKENDS.get(json.loads(Path(model, "config.json").read_text())["model_type"], "triton"),
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        dtype="bfloat16",
    )


BACKENDS = {"deepseek_v32": "dsa"}


@torch.no_grad()
def load(model: torch.nn.Module, directory: str) -> dict[str, Any]:
    """Load the weights of a directory; return the names of parameters that were not set, and the number of calls."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.fill_(UNSET)
    num_calls = 0

    def count_calls(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        nonlocal num_calls
        num_calls += 1
        model.load_weights(tensors)

    stream(list(tensors_of(f"{directory}/sent").items())).load(count_calls)
    mark = torch.tensor(UNSET)
    unset = [
        name for name, parameter in parameters.items() if not name.endswith(PADDED) and bool((parameter == mark.to(parameter.dtype)).any())
    ]
    return {"unset": unset, "num_calls": num_calls}


def stream(weights: list[tuple[str, torch.Tensor]]) -> Stream:
    """Return a stream with a bucket per tensor, and one for all tensors of an attention."""
    buckets = [list(bucket) for _, bucket in groupby(weights, key=lambda named: named[0].partition(".self_attn.")[0])]
    lists = [[(name, str(tensor.dtype)[6:], list(tensor.shape), tensor.nbytes) for name, tensor in bucket] for bucket in buckets]
    store = HashStore()
    for number, tensors in enumerate([*lists, None]):
        store.set(f"0/{number}", json.dumps(tensors))
    sent = iter(buckets)

    def broadcast(row: torch.Tensor, **_: Any) -> SimpleNamespace:
        row.copy_(torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in next(sent)]))
        return SimpleNamespace(wait=lambda: None)

    dist.broadcast = broadcast
    return Stream(store, "0", SimpleNamespace(rank=lambda: 1), "cpu")


def main(directories: list[str]) -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # sparse attention asks for it
    deepseek_weight_loader.should_async_load = lambda _: False  # as with tensors on a GPU; threads would keep some
    for number, directory in enumerate(directories):
        args = server_args(directory)
        if number == 0:
            start(args)
        set_global_server_args_for_scheduler(args)
        config = ModelConfig.from_server_args(args)
        initialize_dp_attention(server_args=args, model_config=config)
        model_class, _ = get_model_architecture(config)
        torch.set_default_dtype(torch.bfloat16)
        model = _initialize_model(config, LoadConfig(), None)
        torch.set_default_dtype(torch.float32)
        print(json.dumps({"class": model_class.__name__, **load(model, directory)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
