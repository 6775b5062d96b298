"""Importance weights between engine and trainer."""

import pytest
import torch

from fuligo.algorithms.off_policy import Correction, importance_weights, opsm_mask
from fuligo.algorithms.policy_loss import Segments

RATIOS = torch.tensor([0.25, 1.0, 4.0, 1.5, 1.2])
SEGMENTS = Segments(torch.ones(5), torch.tensor([0, 0, 0, 1, 1]), 2)


def corrected(mode, low, high, segments=SEGMENTS):
    old = RATIOS.log().requires_grad_()
    result = importance_weights(old, torch.zeros(5), Correction(mode, low, high), segments)
    assert not result.weights.requires_grad
    return result


def test_truncation_clamps_to_both_bounds():
    result = corrected("truncate", 0.5, 2.0)
    assert result.weights.tolist() == pytest.approx([0.5, 1.0, 2.0, 1.5, 1.2])
    assert result.cut.tolist() == [True, False, True, False, False]


def test_the_default_bounds_truncate_from_above_only():
    result = importance_weights(RATIOS.log(), torch.zeros(5), Correction(), SEGMENTS)
    assert result.weights.tolist() == pytest.approx([0.25, 1.0, 2.0, 1.5, 1.2])


def test_icepop_leaves_out_single_tokens():
    result = corrected("icepop", 0.5, 2.0)
    assert result.weights.tolist() == pytest.approx([0, 1.0, 0, 1.5, 1.2])
    assert result.cut.tolist() == [True, False, True, False, False]


def test_the_sequence_mask_judges_a_samples_geometric_mean_and_leaves_it_out_whole():
    """0.25 * 1 * 4 = 1: kept, with its tokens' own ratios. (1.5 * 1.2) ** (1 / 2) = 1.34: outside."""
    result = corrected("sequence-mask", 0.8, 1.3)
    assert result.weights.tolist() == pytest.approx([0.25, 1.0, 4.0, 0, 0])
    assert result.cut.tolist() == [False, False, False, True, True]


def test_the_sequence_mask_counts_trained_tokens_only():
    """Without its middle and last token, the first sample's mean is 0.25."""
    segments = Segments(torch.tensor([1, 0, 0, 1, 1]), SEGMENTS.sample_ids, 2)
    assert corrected("sequence-mask", 0.8, 1.3, segments).cut.tolist() == [True, True, True, True, True]


def test_opsm_measures_a_samples_mean_over_trained_tokens_and_masks_only_its_bad_tokens():
    """0.2 for the first sample, whose masked token does not count; 0.05 for the second; the third came nearer."""
    old = torch.tensor([0.1, 0.3, 9.0, 0.1, 0.0, -1.0])
    logprobs = torch.zeros(6, requires_grad=True)
    segments = Segments(torch.tensor([1, 1, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 2]), 3)

    def masked(advantages, delta):
        result = opsm_mask(logprobs, old, torch.tensor(advantages), delta, segments)
        assert not result.requires_grad
        return result.tolist()

    assert masked([-1.0] * 6, 0.1) == [True, True, True, False, False, False]
    assert masked([-1.0] * 6, 0.04) == [True, True, True, True, True, False]
    assert masked([-1.0, 1.0, 1.0, 0.0, 0.0, -1.0], 0.0) == [True, False, False, False, False, False]
    assert not any(masked([1.0] * 6, 0.0))
