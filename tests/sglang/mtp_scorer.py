"""Run SGLang's own classes of MTP layers on a CPU, in SGLang's interpreter, with the weights that the trainer sends.

    python mtp_scorer.py DIRECTORY [DIRECTORY ...]

Builds SGLang's draft model of each directory and loads all tensors of `sent/*.safetensors` into it, as a sync does. `inputs.safetensors`
has `later` [T], the token after each, and `hidden` [T, E]; the layer's hidden states [T, E] are written to `outputs.safetensors`. Prints a
line of JSON for each: the draft model's class, and the parameters into which nothing was loaded, of the draft model and of the served one,
which gets the same tensors. What SGLang has no kernel for on a CPU without
AMX is computed in torch: attention, and the gates of its output and of the shared expert.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from fp8_loader import start
from safetensors.torch import load_file, save_file
from sent_loader import load, server_args, tensors_of
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.models import qwen2_moe, qwen3_5
from sglang.srt.server_args import set_global_server_args_for_scheduler


class Batch(SimpleNamespace):
    """Batch of one sequence; what a CPU's layers do not need is None."""

    def __getattr__(self, name: str) -> None:
        return None


def attend(self: RadixAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Compute causal attention of one sequence, [T, H * D] each."""
    heads = [
        x.reshape(len(q), -1, size).transpose(0, 1) for x, size in ((q, self.qk_head_dim), (k, self.qk_head_dim), (v, self.v_head_dim))
    ]
    out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scaling, enable_gqa=True)
    return out.transpose(0, 1).reshape(len(q), -1)


def add_gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, total: torch.Tensor) -> None:
    total += torch.sigmoid(hidden @ gate)[:, None] * shared


def plain_torch() -> None:
    RadixAttention.forward = attend
    qwen3_5._is_cpu = qwen3_5._is_cuda = False  # selects the operations that are not fused
    qwen3_5.fused_sigmoid_mul = lambda x, gate, **_: x * torch.sigmoid(gate.reshape(x.shape))
    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated


@torch.no_grad()
def run(model: torch.nn.Module, directory: Path) -> None:
    embedding = next(tensor for name, tensor in tensors_of(f"{directory}/sent").items() if name.endswith("embed_tokens.weight"))
    model.model.embed_tokens.weight[: len(embedding)].copy_(embedding)  # the served model's, which SGLang shares with the draft
    inputs = load_file(directory / "inputs.safetensors")
    model.logits_processor.forward = lambda ids, hidden, *_: hidden
    batch = Batch(
        forward_mode=ForwardMode.EXTEND,
        spec_info=SimpleNamespace(hidden_states=inputs["hidden"]),
        contains_mm_inputs=lambda: False,
        input_ids=inputs["later"],
    )
    positions = torch.arange(len(inputs["later"]))
    save_file({"hidden": model(inputs["later"], positions, batch).contiguous()}, directory / "outputs.safetensors")


def main(directories: list[str]) -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    plain_torch()
    for number, directory in enumerate(directories):
        args = server_args(directory)
        if number == 0:
            start(args)
        set_global_server_args_for_scheduler(args)
        missing: list[list[str]] = []
        for is_draft in (False, True):
            config = ModelConfig.from_server_args(args, is_draft_model=is_draft)
            initialize_dp_attention(server_args=args, model_config=config)
            model = _initialize_model(config, LoadConfig(), None)
            missing.append(load(model, directory)["unset"])
        served, draft = missing
        print(json.dumps({"class": type(model).__name__, "unset": draft, "unset_of_served": served}), flush=True)
        run(model, Path(directory))


if __name__ == "__main__":
    main(sys.argv[1:])
