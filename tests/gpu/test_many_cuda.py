"""Several LoRA runs on one GPU: base weights in memory once, and each run as alone up to rounding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fuligo.config.command_line import parse
from fuligo.config.files import save_yaml
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.models.adapter import base_tensors
from fuligo.trainer.ranks.commands import Command, call_rank
from fuligo.trainer.ranks.executor import RankExecutor
from fuligo.trainer.ranks.rank import Rank
from fuligo.trainer.ranks.settings import LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.shared import SharedTrainer
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from tests.e2e.command import succeed, train_command
from tests.e2e.conftest import save_prompts
from tests.e2e.records import metrics


@pytest.fixture
def trainer() -> Iterator[SharedTrainer]:
    shared = SharedTrainer()
    yield shared
    shared.stop()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run(executor: RankExecutor, command: Command[Any]) -> Any:
    answer = executor.answer(lambda: command, is_queued=True).result(300)
    if answer.error is not None:
        raise answer.error
    return answer.value


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_second_run_takes_memory_for_its_adapter_only(trainer: SharedTrainer, checkpoint: Path, precision: Any) -> None:
    optimizer = OptimizerSettings(LearningRateSchedule(peak=1e-3))
    lora = LoraSettings(AdapterConfig(rank=2, alpha=8.0))
    settings = TorchTrainerSettings(checkpoint, checkpoint, optimizer, lora=lora, device="cuda", precision=precision)
    executors = [trainer.executor() for _ in range(2)]
    run(executors[0], call_rank(Rank.load, settings, None))
    base = sum(tensor.nbytes for tensor in base_tensors(executors[0].rank.worker.policy.model).values())
    before = torch.cuda.memory_allocated()
    run(executors[1], call_rank(Rank.load, settings, None))
    assert torch.cuda.memory_allocated() - before < 0.3 * base


def test_runs_learn_at_once_as_alone(checkpoint: Path, tmp_path: Path) -> None:
    prompts = save_prompts(tmp_path / "prompts.jsonl")
    files = []
    for name, rank in {"wide": 8, "narrow": 2}.items():
        flags = {"device": "cuda", "rollout_backend": "embedded", "lora_rank": rank, "lr": 1e-3, "num_rollout": 3}
        _, *arguments = train_command(checkpoint, prompts, **flags, run_dir=tmp_path / "alone" / name)
        succeed("train", *arguments)
        _, *arguments = train_command(checkpoint, prompts, **flags, run_dir=tmp_path / "together" / name)
        files.append(tmp_path / f"{name}.yaml")
        save_yaml(parse(arguments).config, files[-1])
    succeed("train-many", *files)
    for name in ("wide", "narrow"):
        alone, together = (metrics(tmp_path / way / name) for way in ("alone", "together"))
        assert len(together) == 3
        assert all(step["train/logprob_abs_diff"] < 0.05 for step in together)
        assert together[0]["train/grad_norm"] == pytest.approx(alone[0]["train/grad_norm"], rel=0.2)
