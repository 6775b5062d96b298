"""Planned tokens, time and memory of shared prompts against the packing itself, and against what autograd keeps."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from fuligo.config.command_line import parse
from fuligo.layout.megatron import layout_of
from fuligo.planner.layout import make_layout
from fuligo.planner.lengths import (
    average_prompt,
    average_response,
    computed_tokens,
    copied_keys_per_token,
    num_micro_batches,
    samples_per_tree,
)
from fuligo.planner.memory.activations import copied_elements, layer_bytes
from fuligo.planner.memory.torch_trainer import torch_trainer_items
from fuligo.planner.subject import read_subject
from fuligo.planner.training_time import rollout_forward_flops, train_phase, trainer_forward_flops
from fuligo.trainer.packing import Capacity, pack
from fuligo.trainer.shared_prefixes import find_shared_prefixes, lay_out
from fuligo.trainer.torch_backend.packed_attention import PACKED_ATTENTION, register
from tests.unit.planner.subjects import EXAMPLES, subject_of

TORCH = "--train-backend torch --precision bf16 --rollout-batch-size 4 --rollout-max-prompt-len 200 --rollout-max-response-len 120"
MEGATRON = "--train-backend megatron --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel"
SHARED = "--share-prefixes on --n-samples-per-prompt 8"


@pytest.mark.parametrize(
    ("limit", "num_together"),
    [
        ("--use-dynamic-batch-size --max-tokens-per-gpu 8192", 8),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 450", 4),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 320", 2),
        ("--micro-batch-size 3", 3),
        ("--micro-batch-size 1", 1),
        ("", 8),
    ],
)
def test_as_many_answers_share_a_prompt_as_a_row_holds(limit: str, num_together: int) -> None:
    config = subject_of(f"{TORCH} {SHARED} {limit}", "glm4-9b").config
    shape = layout_of(config)
    assert samples_per_tree(config, shape) == num_together
    prompt, response = average_prompt(config), average_response(config)
    group = [np.concatenate([np.arange(prompt), 1000 * (i + 1) + np.arange(response)]).astype(np.int32) for i in range(8)]
    most = int(limit.rpartition(" ")[2]) if limit else 8192
    capacity = Capacity(max_samples=most) if "--micro" in limit else Capacity(max_tokens=most)
    (plans,) = pack([len(tokens) for tokens in group], capacity, prefixes=find_shared_prefixes(group))
    fullest = max(plans, key=lambda plan: len(plan.samples))
    assert len(fullest.samples) == num_together
    tree = lay_out([len(group[i]) for i in fullest.samples], fullest.shared or [0] * num_together).tree
    assert tree.num_tokens / num_together == computed_tokens(config, shape)
    answers = tree.path_starts[-1] - (prompt if num_together > 1 else 0)  # the prompt's own keys are those of its answers as well
    assert answers / tree.num_tokens - 1 == pytest.approx(copied_keys_per_token(config, shape))


@pytest.mark.parametrize("flags", [TORCH, MEGATRON], ids=["torch", "megatron"])
def test_shared_prompts_cost_less_time_and_rows(flags: str) -> None:
    limit = "--use-dynamic-batch-size --max-tokens-per-gpu 2048 --rollout-max-response-len 120"
    plain, shared = (
        subject_of(f"{flags} {limit} --n-samples-per-prompt 8 {more}", "glm4-9b")
        for more in ("--share-prefixes off", "--share-prefixes on")
    )
    shape = layout_of(plain.config)
    assert samples_per_tree(plain.config, shape) == 1 and copied_keys_per_token(plain.config, shape) == 0
    assert trainer_forward_flops(plain, shape) == rollout_forward_flops(plain) == rollout_forward_flops(shared)
    assert trainer_forward_flops(shared, shape) < 0.5 * trainer_forward_flops(plain, shape)
    assert num_micro_batches(shared, shape) <= num_micro_batches(plain, shape)
    seconds, fewer = (train_phase(subject, make_layout(subject)) for subject in (plain, shared))
    assert fewer.duration_s < seconds.duration_s and "each prompt computed once for 8 responses" in fewer.note


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_row_of_the_torch_trainer_keeps_the_copied_keys_in_float32(precision: str) -> None:
    flags = f"{TORCH} --precision {precision} --use-dynamic-batch-size --max-tokens-per-gpu 2048 --n-samples-per-prompt 8"
    plain, shared = (subject_of(f"{flags} --share-prefixes {choice}", "glm4-9b") for choice in ("off", "on"))
    before, after = (next(item for item in torch_trainer_items(subject) if item.name == "activations") for subject in (plain, shared))
    architecture, shape, size = shared.architecture, layout_of(shared.config), {"bf16": 2, "fp32": 4}[precision]
    copied = [copied_elements(layer, architecture, shape, shared.config, num_bytes=size) for layer in architecture.layers]
    copies = size * 2048 * sum(copied)
    assert after.num_bytes - before.num_bytes == pytest.approx(copies, rel=1e-6, abs=1)
    assert (copies > 0) == (precision == "fp32"), "the kernel for half precision copies them again"


@pytest.mark.parametrize(("model", "keeps"), [("glm4-9b", False), ("glm4.7-flash", True)])
def test_a_row_of_the_megatron_trainer_keeps_the_copied_keys_of_latent_attention(model: str, keeps: bool) -> None:
    flags = f"{MEGATRON} --use-dynamic-batch-size --max-tokens-per-gpu 2048 --rollout-max-response-len 120 --n-samples-per-prompt 8"
    plain, shared = (subject_of(f"{flags} --share-prefixes {choice}", model) for choice in ("off", "on"))
    ours = [layer_bytes(s.architecture.layers[0], s.architecture, layout_of(s.config), s.config) for s in (plain, shared)]
    trained = shared.architecture
    added = 2 * copied_elements(trained.layers[0], trained, layout_of(shared.config), shared.config)
    assert ours[1].whole - ours[0].whole == pytest.approx(added) and ours[1].stored - ours[0].stored == pytest.approx(added)
    assert (added > 0) == keeps


def test_autograd_keeps_as_many_copied_keys_as_planned() -> None:
    register()
    prompt, response, num_answers = 96, 16, 4
    config = Qwen3Config(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64, num_hidden_layers=1
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION).train()
    tree = lay_out([prompt + response] * num_answers, [0, *[prompt] * (num_answers - 1)]).tree

    def saved(**sequences: object) -> int:
        kept: dict[int, int] = {}
        ours = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack_tensor(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in ours and tensor.dtype == torch.float32:
                kept[storage.data_ptr()] = storage.nbytes()
                held.append(tensor)
            return tensor

        held: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor):
            ids = torch.arange(tree.num_tokens)[None] % 64
            model.base_model(input_ids=ids, position_ids=torch.from_numpy(tree.depths)[None], use_cache=False, **sequences)
        return sum(kept.values())

    of_tree, of_row = saved(packed_tree=tree), saved(packed_cu_seqlens=(0, tree.num_tokens))
    keys_and_values, heads = 2 * 2 * 16, 4 * 16
    copied = num_answers * (prompt + response) + prompt - tree.num_tokens
    # On a CPU, which computes node by node, also the mask of the answers, and the outputs before they are joined.
    mask, outputs = response * (prompt + response), tree.num_tokens * heads
    assert of_tree - of_row == 4 * (keys_and_values * copied + mask + outputs)


def test_auto_shares_nothing_with_a_teacher_that_cannot() -> None:
    """Recurrent layers of the teacher, whose passes have the same rows as the policy's."""
    distilled = "--use-opd --opd-type trainer --opd-teacher-load"
    for teacher, shares in (("qwen3-4b", True), ("qwen3-next-80b", False)):
        flags = ["--config", str(EXAMPLES / "calculator" / "config.yaml"), *f"{distilled} {EXAMPLES / teacher / 'model'}".split()]
        assert read_subject(parse(flags).config, "h100-80").config.shares_prefixes == shares
