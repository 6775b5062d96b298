"""Load weights under the names that the trainer sends into SGLang's own classes, in SGLang's interpreter; nothing is computed.

    python sent_loader.py DIRECTORY [DIRECTORY ...]

Builds SGLang's model of each directory and loads `sent/*.safetensors` below it. Prints a line of JSON for each: the model's class and the
parameters into which nothing was loaded.
"""

import json
import sys
from pathlib import Path

import torch
from fp8_loader import UNSET, start, tensors_of
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.model_loader.utils import get_model_architecture
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

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
def unset(model: torch.nn.Module, directory: str) -> list[str]:
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.fill_(UNSET)
    model.load_weights(iter(tensors_of(f"{directory}/sent").items()))
    mark = torch.tensor(UNSET)
    return [
        name for name, parameter in parameters.items() if not name.endswith(PADDED) and bool((parameter == mark.to(parameter.dtype)).any())
    ]


def main(directories: list[str]) -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # sparse attention asks for it
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
        print(json.dumps({"class": model_class.__name__, "unset": unset(model, directory)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
