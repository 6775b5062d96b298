"""SGLang's own draft models of Qwen3-Next and Qwen3.5 take the MTP layer that the trainer sends, and compute as the trainer's does."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.models.mtp import mtp_module
from fuligo.models.registry import experts_in
from fuligo.models.transformers_types import language_model
from fuligo.trainer.batch import pack_tokens
from fuligo.trainer.mtp import later_tokens
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from tests import tiny_mtp, train_batches
from tests.parity.test_mtp import trained_settings
from tests.sglang.engines import run_program
from tests.sglang.test_families import tiny_family

CLASSES = {"qwen3_next": "Qwen3NextForCausalLMMTP", "qwen3_5": "Qwen3_5ForCausalLMMTP", "qwen3_5_moe": "Qwen3_5ForCausalLMMTP"}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TorchRankWorker]:
    """Return trainers whose MTP layers are loaded; each checkpoint has what it sends in `sent/`."""
    found: dict[str, TorchRankWorker] = {}
    for name in CLASSES:
        family = replace(tiny_family(name), in_float32=())
        checkpoint = tiny_mtp.add_mtp(family.save(tmp_path_factory.mktemp(name), name, device="cpu", dtype=torch.float32))
        worker = TorchRankWorker(trained_settings(checkpoint), World())
        sent = checkpoint_weights(worker.named_weights(), experts_in(checkpoint))
        (checkpoint / "sent").mkdir()
        save_file({name: tensor.clone() for name, tensor in sent}, checkpoint / "sent" / "model.safetensors")
        found[name] = worker
    return found


@torch.no_grad()
def write_inputs(worker: TorchRankWorker) -> torch.Tensor:
    """Write hidden states of a sample and the token after each; return [T, E] what the trainer's layer makes of them."""
    sample = train_batches.sample(0, prompt_length=10, response_length=30)
    tokens, model = pack_tokens([sample], torch.device("cpu")), worker.policy.model
    later, module = later_tokens(tokens, 1), mtp_module(model)
    assert module is not None
    hidden = worker.policy.hidden_states(tokens)
    found = worker.policy._predicted(hidden, tokens, later, is_joint=False)
    inputs = {"later": later.input_ids[0], "hidden": hidden[0]}
    save_file({name: tensor.clone() for name, tensor in inputs.items()}, worker.settings.hf_checkpoint / "inputs.safetensors")
    assert language_model(model).embed_tokens.weight.dtype == torch.float32
    return found


@pytest.fixture(scope="module")
def scored(workers: dict[str, TorchRankWorker]) -> dict[str, tuple[dict, torch.Tensor]]:
    """Run SGLang's classes in one process; return their reports and the trainer's hidden states."""
    expected = {name: write_inputs(worker) for name, worker in workers.items()}
    lines = run_program("mtp_scorer", *(worker.settings.hf_checkpoint for worker in workers.values()))
    reports = [json.loads(line) for line in lines if line.startswith("{")]
    return {name: (report, expected[name]) for name, report in zip(CLASSES, reports, strict=True)}


@pytest.mark.parametrize("name", CLASSES)
def test_sglangs_served_and_draft_models_take_all_weights(name: str, scored: dict[str, tuple[dict, torch.Tensor]]) -> None:
    report, _ = scored[name]
    assert report == {"class": CLASSES[name], "unset": [], "unset_of_served": []}


@pytest.mark.parametrize("name", CLASSES)
def test_sglangs_draft_model_computes_as_the_trainer(
    name: str, workers: dict[str, TorchRankWorker], scored: dict[str, tuple[dict, torch.Tensor]]
) -> None:
    _, expected = scored[name]
    found = load_file(workers[name].settings.hf_checkpoint / "outputs.safetensors")["hidden"]
    assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()
