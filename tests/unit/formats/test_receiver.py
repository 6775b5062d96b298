import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from fuligo.errors import WeightSyncError
from fuligo.formats.receiver import WeightStore
from fuligo.formats.stored_experts import StoredExperts
from fuligo.formats.weight_manifest import weights_checksum
from tests import tiny
from tests.megatron.checkpoints import expert_by_expert, perturb


def digest(module: torch.nn.Module) -> str:
    return weights_checksum(module.named_parameters()).checksum


def dense(**overrides: object) -> WeightStore:
    model = tiny.model("qwen3", seed=0, **overrides)
    assert isinstance(model, PreTrainedModel)
    return WeightStore(model, experts=StoredExperts.APART)


@pytest.fixture
def store() -> WeightStore:
    return dense()


@pytest.fixture
def newer() -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in tiny.model("qwen3", seed=1).named_parameters()]


def test_the_version_comes_with_the_last_bucket(store: WeightStore, newer: list[tuple[str, torch.Tensor]]) -> None:
    store.load_tensors(newer[:5], None)
    assert (store.version, store.torn) == (0, True)
    store.load_tensors(newer[5:], 7)
    assert (store.version, store.torn) == (7, False)
    assert digest(store.module) == weights_checksum(newer).checksum


def test_misfits_beyond_the_eighth_are_counted(store: WeightStore, newer: list[tuple[str, torch.Tensor]]) -> None:
    unknown = [(f"other.{number}", torch.ones(1)) for number in range(9)]
    with pytest.raises(WeightSyncError, match=r"named other\.7.* and 1 more problem; nothing was loaded"):
        store.load_tensors([*newer, *unknown], 1)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda tensors: [*tensors, ("model.layers.9.weight", torch.ones(1))], "no weight named model.layers.9.weight"),
        (lambda tensors: [(tensors[0][0], torch.ones(3, 3)), *tensors[1:]], r"has shape \[3, 3\]"),
        (lambda tensors: [(tensors[0][0], tensors[0][1].int()), *tensors[1:]], "not a float type"),
        (lambda tensors: tensors[1:], "was not sent"),
    ],
)
def test_a_misfit_is_named_and_changes_nothing(store: WeightStore, newer: list[tuple[str, torch.Tensor]], change, cause: str) -> None:
    before = digest(store.module)
    with pytest.raises(WeightSyncError, match=cause):
        store.load_tensors(change(newer), 1)
    assert (digest(store.module), store.version, store.torn) == (before, 0, False)


def test_an_interrupted_sync_can_be_sent_again(store: WeightStore, newer: list[tuple[str, torch.Tensor]]) -> None:
    store.load_tensors(newer[:5], None)
    store.load_tensors(newer, 1)
    assert (store.version, store.torn) == (1, False)


def test_tied_weights_are_one_parameter_under_two_names() -> None:
    store = dense(tie_word_embeddings=True)
    newer = dict(tiny.model("qwen3", seed=1, tie_word_embeddings=True).named_parameters())
    assert "lm_head.weight" not in newer
    store.load_tensors(list(newer.items()), 1)
    store.load_tensors([*newer.items(), ("lm_head.weight", newer["model.embed_tokens.weight"])], 2)
    assert store.version == 2
    assert digest(store.module) == weights_checksum(newer.items()).checksum


def test_weights_are_cast_to_the_engines_type(store: WeightStore, newer: list[tuple[str, torch.Tensor]]) -> None:
    store.module.bfloat16()
    store.load_tensors(newer, 1)
    assert digest(store.module) == weights_checksum((name, tensor.bfloat16()) for name, tensor in newer).checksum


def mixture(seed: int) -> PreTrainedModel:
    """Return an MoE model with a nonzero correction of the router's scores, which is a buffer."""
    model = tiny.model("glm4_moe", seed=seed, num_nextn_predict_layers=1)
    assert isinstance(model, PreTrainedModel)
    perturb(model)
    return model


def of_mixture(seed: int) -> list[tuple[str, torch.Tensor]]:
    return list(expert_by_expert(mixture(seed).state_dict()).items())


def test_each_expert_and_the_corrections_of_scores_have_names_of_their_own() -> None:
    store, newer = WeightStore(mixture(0), experts=StoredExperts.APART), of_mixture(1)
    assert {"model.layers.1.mlp.experts.7.up_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias"} <= dict(newer).keys()
    for start in range(0, len(newer), 5):
        store.load_tensors(newer[start : start + 5], 1 if start + 5 >= len(newer) else None)
    assert weights_checksum(store.named_weights().items()) == weights_checksum(newer)
    assert weights_checksum(store.module.state_dict().items()) == weights_checksum(mixture(1).state_dict().items())


def test_an_expert_that_was_not_sent_is_named() -> None:
    store = WeightStore(mixture(0), experts=StoredExperts.APART)
    left_out = "model.layers.1.mlp.experts.3.down_proj.weight"
    with pytest.raises(WeightSyncError, match=f"{left_out} was not sent"):
        store.load_tensors([(name, tensor) for name, tensor in of_mixture(1) if name != left_out], 1)


def test_prediction_layers_are_passed_over_and_nothing_else_is(tmp_path: Path) -> None:
    """MTP weights (layer 2 of a model with two layers) are skipped, from memory and from disk."""
    unused = ("model.layers.2.eh_proj.weight", torch.ones(2, 2))
    store = WeightStore(mixture(0), experts=StoredExperts.APART)
    store.load_tensors([unused, *of_mixture(1)], 1)
    assert weights_checksum(store.named_weights().items()) == weights_checksum(of_mixture(1))
    with pytest.raises(WeightSyncError, match=r"no weight named model\.layers\.3\.eh_proj"):
        store.load_tensors([("model.layers.3.eh_proj.weight", torch.ones(2, 2)), *of_mixture(1)], 2)
    mixture(2).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), unused[0]: unused[1]}, file, metadata={"format": "pt"})
    store.load_directory(str(tmp_path), 3)
    assert weights_checksum(store.named_weights().items()) == weights_checksum(of_mixture(2))


def test_a_directory_is_loaded_as_a_whole(store: WeightStore, tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path, "qwen3", seed=1)
    store.load_directory(str(tmp_path), 3)
    assert store.version == 3
    assert digest(store.module) == digest(tiny.model("qwen3", seed=1))


def test_a_directory_that_does_not_fit_changes_nothing(store: WeightStore, tmp_path: Path) -> None:
    before = digest(store.module)
    missing = tmp_path / "missing"
    other = tiny.save_checkpoint(tmp_path / "other", "qwen3", layers=3)
    truncated = tiny.save_checkpoint(tmp_path / "truncated", "qwen3")
    file = truncated / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    emptied = tiny.save_checkpoint(tmp_path / "emptied", "qwen3")
    shutil.copy(tiny.save_checkpoint(tmp_path / "llama", "llama") / "model.safetensors", emptied / "model.safetensors")
    for directory in (missing, other, truncated, emptied):
        with pytest.raises(WeightSyncError, match=str(directory)):
            store.load_directory(str(directory), 1)
    assert (digest(store.module), store.version) == (before, 0)
