"""MTP on Megatron-Core against the same layers in plain torch: loss and gradients of packed rows, for families and layouts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuligo.config.groups import OptimizerFlags, ParallelFlags
from fuligo.errors import ConfigError
from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.model_config import transformer_config
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import TrainedParameters
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import StepSamples
from fuligo.types import TrainBatch
from tests import shares, train_batches
from tests.megatron.gradients import assert_gradients_agree, megatron_gradients
from tests.megatron.policies import mtp_flags, recomputing, settings_of
from tests.megatron.prediction_fixture import PredictingModel
from tests.megatron.ranks import RankPool

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9)]
"""(prompt, response) lengths; in the second and the fourth an MTP layer would need tokens before the sample."""
LOSS = LossSettings(loss_type="sft_loss")
SCALE = 0.3
SLOW = pytest.mark.slow

SHAPES: dict[str, dict[str, Any]] = {
    "mimo": {"layers": 4},
    "glm4_moe": {},
    "glm4_moe_lite": {"rms_norm_eps": 1e-6},  # transformers hard-codes it for the norms of latents
}
LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2, num_ranks=2),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "dp2": Layout(num_ranks=2),
    "pp2 vpp2": Layout(pp=2, vpp=2, num_ranks=2),
    "tp2 sp pp2": Layout(tp=2, sequence_parallel=True, pp=2, num_ranks=4),
    "ep2": Layout(ep=2, num_ranks=2),
}


@dataclass(slots=True)
class Reference:
    """Model in plain torch, the gradients of its loss, and its checkpoint."""

    model: PredictingModel
    directory: Path
    prediction_loss: float


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory):
    made: dict[tuple[str, int], Reference] = {}

    def reference(family: str, num_predictions: int) -> Reference:
        if (family, num_predictions) not in made:
            model = PredictingModel.random(family, num_predictions=num_predictions, **SHAPES[family])
            directory = model.save(tmp_path_factory.mktemp(family))
            made[family, num_predictions] = Reference(model, directory, backward(model))
        return made[family, num_predictions]

    return reference


def batch() -> TrainBatch:
    return train_batches.batch(train_batches.samples(LENGTHS))


def backward(model: PredictingModel) -> float:
    """Run backward sample by sample; return the mean loss of the MTP layers."""
    step = StepSamples.of(batch(), 0, LOSS)
    total = torch.zeros(())
    for sample, weights in zip(step.samples, step.weights):
        logprobs, *further = (-(torch.from_numpy(weights) * found).sum() for found in model.logprobs(sample))
        prediction = torch.stack(further).mean()
        (logprobs + SCALE * prediction).backward()
        total += prediction.detach()
    return float(total)


def prediction_settings(
    reference: Reference, layout: Layout, *, trained: bool = True, joint: bool = True, **overrides: Any
) -> MegatronTrainerSettings:
    given = {
        "capacity": Capacity(max_tokens=34),
        "loss": LOSS,
        "dispatcher": "alltoall",
        "optimizer_place": OptimizerFlags(use_distributed_optimizer=False),
        "mtp": mtp_flags(len(reference.model.layers), trained=trained, loss_scale=SCALE, joint=joint),
    }
    return settings_of(reference.directory, layout, **{**given, **overrides})


@pytest.mark.parametrize(
    ("family", "num_predictions", "layout"),
    [
        ("mimo", 1, "one"),
        ("mimo", 1, "tp2"),
        ("mimo", 1, "pp2"),
        ("mimo", 2, "cp2"),
        ("glm4_moe", 1, "tp2 sp"),
        *(pytest.param("mimo", 2, layout, marks=SLOW) for layout in LAYOUTS if "ep" not in layout),
        ("glm4_moe_lite", 1, "one"),
        *(pytest.param("glm4_moe_lite", 1, layout, marks=SLOW) for layout in ("tp2 sp", "pp2", "cp2", "ep2")),
        *(pytest.param("glm4_moe", 1, layout, marks=SLOW) for layout in ("one", "ep2", "pp2", "cp2", "tp2 sp pp2")),
    ],
)
def test_gradients_of_joint_training_are_those_of_plain_torch(
    pool: RankPool, references, family: str, num_predictions: int, layout: str
) -> None:
    reference = references(family, num_predictions)
    settings = prediction_settings(reference, LAYOUTS[layout])
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, megatron_gradients, settings, batch())
    assert_gradients_agree(got, reference.model.gradients())


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("one", {"parallel": recomputing("full", "uniform", 1)}),
        ("pp2", {"flags": {"overlap_grad_reduce": True}}),
        *(pytest.param(layout, {}, marks=SLOW) for layout in ("tp2 sp", "cp2", "pp2 vpp2")),
    ],
    ids=str,
)
def test_otherwise_their_loss_trains_only_the_layers(pool: RankPool, references, layout: str, overrides: dict[str, Any]) -> None:
    """The model's gradients equal those without MTP layers; the MTP layers' gradients equal those of joint training."""
    reference, shape = references("mimo", 2), LAYOUTS[layout]
    apart, *_ = pool.run(shape.num_ranks, megatron_gradients, prediction_settings(reference, shape, joint=False, **overrides), batch())
    without, *_ = pool.run(shape.num_ranks, megatron_gradients, prediction_settings(reference, shape, mtp=mtp_flags()), batch())
    assert apart is not None and without is not None
    layers = {name: gradient for name, gradient in reference.model.gradients().items() if ".mtp_layers." in name}
    assert_gradients_agree(apart, without | layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recomputation",
    [recomputing("full", "uniform", 2), recomputing("selective", modules=("moe", "shared_experts"))],
    ids=str,
)
def test_recomputed_activations_give_the_same_gradients(pool: RankPool, references, recomputation: ParallelFlags) -> None:
    reference = references("glm4_moe", 1)
    flags = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}
    settings = prediction_settings(reference, LAYOUTS["tp2 sp"], flags=flags)
    recomputed, *_ = pool.run(2, megatron_gradients, replace(settings, parallel=recomputation), batch())
    kept, *_ = pool.run(2, megatron_gradients, settings, batch())
    assert kept is not None
    assert_gradients_agree(recomputed, kept)


def norm_and_prediction_loss(world: World, settings: MegatronTrainerSettings, of: TrainBatch) -> tuple[float | None, float | None]:
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    metrics = worker.train(shares.to_train(worker, of)).metrics
    return metrics.get("train/grad_norm"), metrics.get("train/mtp_loss")


@pytest.mark.parametrize("layout", ["cp2", "pp2"])
def test_the_loss_is_a_metric_and_the_norm_counts_shared_embeddings_once(pool: RankPool, references, layout: str) -> None:
    reference = references("mimo", 2)
    (norm, loss), *_ = pool.run(2, norm_and_prediction_loss, prediction_settings(reference, LAYOUTS[layout]), batch())
    expected = torch.stack([gradient.norm() for gradient in reference.model.gradients().values()]).norm()
    assert norm == pytest.approx(float(expected), rel=1e-5)
    assert loss == pytest.approx(reference.prediction_loss, rel=1e-5)


def untrained(world: World, settings: MegatronTrainerSettings, of: TrainBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights after a training step and before it."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    before = {name: tensor.clone() for name, tensor in worker.named_weights()}
    worker.train(shares.to_train(worker, of))
    return {name: tensor.clone() for name, tensor in worker.named_weights()}, before


def test_layers_that_are_not_trained_do_not_change_and_do_not_affect_the_model(pool: RankPool, references) -> None:
    reference = references("mimo", 1)
    (after, before), _ = pool.run(2, untrained, prediction_settings(reference, LAYOUTS["pp2"], trained=False), batch())
    (without, _), _ = pool.run(2, untrained, prediction_settings(reference, LAYOUTS["pp2"], mtp=mtp_flags()), batch())
    layers = {name for name in after if ".mtp_layers." in name}
    assert layers and after.keys() - layers == without.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name] if name in layers else without[name]), name


def test_a_copy_of_the_embedding_without_gradients_is_not_waited_for(references) -> None:
    settings = prediction_settings(references("mimo", 1), LAYOUTS["pp2"], trained=False, flags={"overlap_grad_reduce": True})
    with pytest.raises(
        ConfigError, match="--overlap-grad-reduce with --mtp-num-layers 1 and 2 pipeline stages needs --enable-mtp-training"
    ):
        transformer_config(settings)


def refused(world: World, settings: MegatronTrainerSettings) -> str:
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    with pytest.raises(ConfigError) as failure:
        MegatronRankWorker(settings, world)
    return str(failure.value)


def test_a_loss_that_trains_nothing_is_refused(pool: RankPool, references) -> None:
    settings = prediction_settings(references("mimo", 1), LAYOUTS["one"], joint=False)
    (text,) = pool.run(1, refused, replace(settings, trained=TrainedParameters(frozen=("mtp",))))
    assert "--enable-mtp-training: --freeze-params-name-list freezes all their parameters" in text
