"""Lists of weights that the Megatron trainer trains or freezes, over pipeline stages, and lists that it refuses."""

from pathlib import Path

import pytest

from fuligo.errors import ConfigError
from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.ranks.settings import TrainedParameters
from fuligo.trainer.ranks.world import World
from tests import tiny, train_batches
from tests.megatron.policies import changed_by_a_step, settings_of
from tests.megatron.ranks import RankPool


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", layers=4)


@pytest.mark.parametrize(
    ("lists", "left"),
    [
        (TrainedParameters(only=(r"layers\.1\.mlp", r"linear_proj")), {"layers.1.mlp", "o_proj"}),
        (
            TrainedParameters(frozen=("embed|lm_head", "norm", r"layers\.[0-2]\.", r"self_attn\.[qkv]_proj")),
            {"layers.3.mlp", "layers.3.self_attn.o_proj"},
        ),
    ],
)
def test_only_what_the_lists_leave_is_trained(pool: RankPool, checkpoint: Path, lists: TrainedParameters, left: set[str]) -> None:
    """The lists may use Hugging Face or Megatron names; a pipeline stage without trained weights still joins the step."""
    batch = train_batches.batch(train_batches.samples([(4, 9), (1, 3), (6, 9), (2, 14)]))
    changed, _ = pool.run(2, changed_by_a_step, settings_of(checkpoint, Layout(pp=2, num_ranks=2), trained=lists), batch)
    assert changed and all(any(part in name for part in left) for name in changed)
    assert all(any(part in name for name in changed) for part in left)


def refused(world: World, settings: MegatronTrainerSettings) -> str:
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    with pytest.raises(ConfigError) as failure:
        MegatronRankWorker(settings, world)
    return str(failure.value)


def test_queries_cannot_be_trained_without_their_keys(pool: RankPool, checkpoint: Path) -> None:
    settings = settings_of(checkpoint, Layout(), trained=TrainedParameters(only=("q_proj",)))
    (text,) = pool.run(1, refused, settings)
    assert "'q_proj' matches model.layers.0.self_attn.q_proj.weight but not all of" in text
