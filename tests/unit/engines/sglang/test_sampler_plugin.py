"""Choice of the batches that `fuligo_sampler` draws for; tests/sglang/test_sampler_plugin.py and tests/gpu test its kernels."""

import importlib
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fuligo.engines.sglang.server import SAMPLER_PLUGIN


@dataclass(frozen=True)
class Requests:
    """SGLang's `SamplingBatchInfo` of requests that sample from the whole vocabulary."""

    is_all_greedy: bool = False
    need_top_p_sampling: bool = False
    need_top_k_sampling: bool = False
    need_min_p_sampling: bool = False
    sampling_seed: Any = None
    temperatures: str = "temperatures"


@dataclass
class Sampler:
    rl_on_policy_target: str | None = None
    synced: list[Any] = field(default_factory=list)

    def _preprocess_logits(self, logits: Any, requests: Requests) -> Any:
        return logits

    def _sync_token_ids_across_tp(self, tokens: Any, requests: Requests) -> None:
        self.synced.append(tokens)


class Logits:
    def __init__(self, *, is_cuda: bool = True, num_rows: int = 2, strides: tuple[int, int] = (8, 1)) -> None:
        self.is_cuda, self.num_rows, self.strides = is_cuda, num_rows, strides

    def __len__(self) -> int:
        return self.num_rows

    def stride(self, dim: int) -> int:
        return self.strides[dim]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the plugin with modules of SGLang and kernels that return names."""
    monkeypatch.syspath_prepend(str(SAMPLER_PLUGIN))
    sglang_sampler, attention, kernels = map(ModuleType, ("sglang.srt.layers.sampler", "sglang.srt.layers.dp_attention", "fuligo_draw"))
    vars(sglang_sampler)["SGLANG_RETURN_ORIGINAL_LOGPROB"] = False
    vars(attention)["get_attention_dp_rank"] = lambda: 3
    vars(kernels)["draw"] = lambda logits, temperatures, replica: (f"drawn by {replica}", f"log-probabilities at {temperatures}")
    for module in (sglang_sampler, attention, kernels):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return importlib.import_module("fuligo_sampler")


def sampled(plugin: Any, sampler: Sampler, logits: Logits, requests: Requests, *others: Any) -> tuple[Any, Any]:
    """Return the tokens and log-probabilities of a batch; SGLang's own sampler returns "own"."""
    output = SimpleNamespace(next_token_logits=logits, next_token_logprobs=None)
    return plugin.sample(lambda *_: "own", sampler, output, requests, *(others or (True, [0, 0], [None, None])), "positions"), output


def test_it_draws_for_requests_that_sample_from_the_whole_vocabulary(plugin: Any) -> None:
    sampler = Sampler()
    tokens, output = sampled(plugin, sampler, Logits(), Requests())
    assert (tokens, output.next_token_logprobs, sampler.synced) == ("drawn by 3", "log-probabilities at temperatures", ["drawn by 3"])


def test_it_draws_without_log_probabilities(plugin: Any) -> None:
    """SGLang passes None instead of lists if no request of a batch asks for log-probabilities."""
    tokens, output = sampled(plugin, Sampler(), Logits(), Requests(), False, None, None)
    assert (tokens, output.next_token_logprobs) == ("drawn by 3", None)


@pytest.mark.parametrize("name", ["is_all_greedy", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling", "sampling_seed"])
def test_other_requests_get_sglangs_sampler(plugin: Any, name: str) -> None:
    assert sampled(plugin, Sampler(), Logits(), replace(Requests(), **{name: True}))[0] == "own"


def test_log_probabilities_of_other_tokens_and_other_devices_get_sglangs_sampler(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for others in ((True, [0, 5], [None, None]), (True, [0, 0], [None, [7]])):
        assert sampled(plugin, Sampler(), Logits(), Requests(), *others)[0] == "own"
    for logits in (Logits(is_cuda=False), Logits(num_rows=0), Logits(strides=(1, 8))):
        assert sampled(plugin, Sampler(), logits, Requests())[0] == "own"
    assert sampled(plugin, Sampler(rl_on_policy_target="fsdp"), Logits(), Requests())[0] == "own"
    monkeypatch.setattr(sys.modules["sglang.srt.layers.sampler"], "SGLANG_RETURN_ORIGINAL_LOGPROB", True)
    assert sampled(plugin, Sampler(), Logits(), Requests())[0] == "own"
