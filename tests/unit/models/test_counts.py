"""Parameter counts of the recipes' models against their names, sums written out here, and published sizes."""

from math import ceil
from pathlib import Path

import pytest

from fuligo.models.architecture import Architecture, LatentAttention, Part, PartKind, Split
from fuligo.models.registry import read_architecture
from tests.cluster_recipes import CLUSTER_RECIPES

EXAMPLES = Path(__file__).parents[3] / "examples"


def architecture(recipe: str, folder: str = "model") -> Architecture:
    return read_architecture(EXAMPLES / recipe / folder)


def sum_of(parts: tuple[Part, ...], kind: PartKind) -> int:
    return sum(part.num_parameters for part in parts if part.kind is kind)


@pytest.mark.parametrize(
    ("recipe", "billions"),
    [
        *(("glm4.7-flash", 30), ("glm4.5-355b", 355), ("glm5.2-744b", 744), ("qwen3-4b", 4.0)),
        *(("deepseek-v3.2", 671), ("qwen3-next-80b", 80), ("minimax-m2", 229), ("gemma3-1b", 1.0)),
        ("gemma4-26b", 25.8),
    ],
)
def test_totals_are_within_two_percent_of_the_names(recipe: str, billions: float) -> None:
    assert architecture(recipe).num_parameters == pytest.approx(billions * 1e9, rel=0.02)


def test_glm4_9b_has_9_40_billion() -> None:
    assert architecture("glm4-9b").num_parameters == 9_400_279_040


def test_qwen3_vl_counts_its_vision_tower() -> None:
    assert architecture("qwen3-vl-8b").num_parameters == 8_767_123_696


def test_qwen3_next_has_the_published_counts() -> None:
    """The total of its files, and what is left of it without the experts that a token does not use."""
    model = architecture("qwen3-next-80b")
    assert (model.num_parameters, model.num_active_parameters) == (79_674_391_296, 3_874_929_408)


@pytest.mark.parametrize(
    ("recipe", "billions"),
    [("glm4-9b", 9.40), ("glm4.7-flash", 3.90), ("glm4.5-355b", 33.63), ("glm5.2-744b", 41.25), ("qwen3-4b", 4.02), ("mimo-7b", 7.62)],
)
def test_active_parameters_count_embedding_and_head(recipe: str, billions: float) -> None:
    assert architecture(recipe).num_active_parameters == pytest.approx(billions * 1e9, abs=0.006e9)


@pytest.mark.parametrize(("recipe", "billions"), [("glm4.7-flash", 3.26), ("glm4.5-355b", 32.08), ("glm5.2-744b", 39.35)])
def test_the_active_parameters_of_the_names_leave_embedding_and_head_out(recipe: str, billions: float) -> None:
    """Names such as A3B, A32B and A40B count only the layers."""
    model = architecture(recipe)
    outer = sum(part.num_parameters for part in model.outer_parts)
    assert model.num_active_parameters - outer == pytest.approx(billions * 1e9, abs=0.006e9)


def test_active_parameters_are_those_of_the_chosen_experts() -> None:
    model = architecture("glm4.5-355b")
    expert = 3 * 5120 * 1536
    assert model.num_parameters - model.num_active_parameters == 89 * (160 - 8) * expert


def test_mimo_is_qwen2_with_a_prediction_layer() -> None:
    """32 heads of 128, 8 of keys and values, biases on queries, keys and values."""
    attention = 4096 * 4096 + 4096 + 2 * (4096 * 1024 + 1024) + 4096 * 4096
    mlp = 3 * 4096 * 11008
    norms = 2 * 4096
    layer = attention + mlp + norms
    embedding = head = 151_680 * 4096
    model = architecture("mimo-7b")
    assert [each.num_parameters for each in model.layers] == [layer] * 36
    assert model.num_parameters == 36 * layer + embedding + head + 4096
    # input_proj [4096, 8192]; token_layernorm, hidden_layernorm, final_layernorm.
    assert [each.num_parameters for each in model.mtp_layers] == [layer + 2 * 4096 * 4096 + 3 * 4096]


def test_prediction_layer_of_glm_4_5() -> None:
    hidden = 5120
    attention = hidden * 96 * 128 + 96 * 128 + 2 * (hidden * 8 * 128 + 8 * 128) + 96 * 128 * hidden + 2 * 128
    expert = 3 * hidden * 1536
    layer = attention + 161 * expert + 160 * hidden + 2 * hidden
    (prediction,) = architecture("glm4.5-355b").mtp_layers
    assert prediction.number == 92
    assert prediction.num_parameters == layer + 2 * hidden * hidden + 3 * hidden
    assert prediction.num_buffer_elements == 160


def test_prediction_layer_of_glm_4_7_flash() -> None:
    hidden, heads = 2048, 20
    queries = hidden * 768 + 768 + 768 * heads * 256
    keys_values = hidden * (512 + 64) + 512 + 512 * heads * (192 + 256)
    layer = queries + keys_values + heads * 256 * hidden + 65 * 3 * hidden * 1536 + 64 * hidden + 2 * hidden
    (prediction,) = architecture("glm4.7-flash").mtp_layers
    assert prediction.num_parameters == layer + 2 * hidden * hidden + 3 * hidden


def test_prediction_layers_of_qwen3_next_and_qwen3_5_have_full_attention() -> None:
    """Gated attention with 16 heads of 256 and 2 of keys and values, a shared expert of the size of one, and its gate."""
    hidden, expert = 2048, 3 * 2048 * 512
    attention = hidden * 2 * 16 * 256 + 2 * hidden * 2 * 256 + 16 * 256 * hidden + 2 * 256
    for recipe, num_experts in (("qwen3-next-80b", 512), ("qwen3.5-35b", 256)):
        (prediction,) = architecture(recipe).mtp_layers
        layer = attention + (num_experts + 1) * expert + num_experts * hidden + hidden + 2 * hidden
        assert prediction.num_parameters == layer + 2 * hidden * hidden + 3 * hidden
        assert not prediction.is_linear


def test_prediction_layer_of_glm_5_2_has_an_indexer() -> None:
    hidden = 6144
    model = architecture("glm5.2-744b")
    indexer = 2048 * 32 * 128 + hidden * 128 + 2 * 128 + hidden * 32
    (prediction,) = model.mtp_layers
    skipping = model.layers[3]
    assert prediction.computes_index
    assert not skipping.computes_index
    assert prediction.num_parameters == skipping.num_parameters + indexer + 2 * hidden * hidden + 3 * hidden


def test_computing_layers_of_glm_5_2() -> None:
    model = architecture("glm5.2-744b")
    assert [layer.number + 1 for layer in model.layers if layer.computes_index] == [1, 2, 3, *range(7, 76, 4)]
    assert model.sparse_index is not None
    assert model.sparse_index.rotary_interleaved


def test_fp8_checkpoint_has_the_published_size() -> None:
    """Blocks of 128 x 128 with a float32 scale each; the rest bf16, correction biases float32.

    755,617,140,416 bytes are reported for the tensors of the published FP8 checkpoint of GLM-5.3, whose config.json differs from GLM-5.2's
    in no shape, the MTP layer included.
    """
    model = architecture("glm5.2-744b", "model-fp8")
    layers = (*model.layers, *model.mtp_layers)
    parts = (*model.outer_parts, *(part for layer in layers for part in layer.parts))
    weights = sum(part.num_parameters * (1 if part.quantizable else 2) for part in parts)
    biases = 4 * sum(layer.num_buffer_elements for layer in layers)

    def scales(rows: int, columns: int) -> int:
        return 4 * ceil(rows / 128) * ceil(columns / 128)

    hidden = 6144
    attention = scales(2048, hidden) + scales(64 * 256, 2048) + scales(576, hidden) + scales(64 * 448, 512) + scales(hidden, 64 * 256)
    indexer = scales(32 * 128, 2048) + scales(128, hidden)
    blocks = 79 * attention + 22 * indexer + 76 * 257 * 3 * scales(2048, hidden) + 3 * 3 * scales(12288, hidden)
    assert weights + biases + blocks == 755_617_140_416


def test_latent_down_projections_are_on_every_rank_and_heads_are_shared() -> None:
    model = architecture("glm4.7-flash")
    attention = [part for part in model.layers[0].parts if part.kind is PartKind.ATTENTION]
    by_split = {part.split: part.num_parameters for part in attention}
    assert by_split == {
        Split.REPLICATED: 2048 * (768 + 512 + 64),
        Split.TENSOR: 768 * 20 * 256 + 512 * 20 * (192 + 256) + 20 * 256 * 2048,
    }
    assert isinstance(model.attention, LatentAttention)
    assert model.attention.kv_elements_per_token == 576


def test_experts_are_spread_and_the_shared_one_is_split() -> None:
    parts = architecture("glm4.5-355b").layers[3].parts
    splits = {part.kind: part.split for part in parts if part.kind in {PartKind.ROUTER, PartKind.ROUTED_EXPERTS, PartKind.SHARED_EXPERT}}
    assert splits == {
        PartKind.ROUTER: Split.REPLICATED,
        PartKind.ROUTED_EXPERTS: Split.EXPERT,
        PartKind.SHARED_EXPERT: Split.TENSOR,
    }
    assert sum_of(parts, PartKind.SHARED_EXPERT) == 3 * 5120 * 1536


def test_tied_embedding_is_counted_once() -> None:
    model = architecture("qwen3-4b")
    assert model.tied_embeddings
    assert model.head is None
    assert [part.kind for part in model.outer_parts] == [PartKind.EMBEDDING, PartKind.NORM]


@pytest.mark.parametrize("recipe", sorted({path.parent.name for path in CLUSTER_RECIPES}))
def test_the_documentation_has_these_counts(recipe: str) -> None:
    rows = (EXAMPLES.parent / "docs" / "models.md").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith(f"| [{recipe}]")]
    model = architecture(recipe)
    counts = [model.num_parameters, model.num_active_parameters, model.num_mtp_parameters]
    assert [cell.strip() for cell in row.split("|")[3:6]] == [f"{count:,}" for count in counts]
