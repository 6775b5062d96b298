"""Default GenerateFn: its requests and what it makes of the answers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from fuligo.config.groups import RolloutFlags
from fuligo.engines.generation import FinishReason, Generation, RoutingQuery, SamplingParams
from fuligo.errors import EngineError
from fuligo.models.routing import RoutingShape
from fuligo.models.vision.processor import ImageProcessor, ResizedImages
from fuligo.rollout.generate import SingleTurn, sampling_params, trim
from fuligo.types import IntArray, PromptImage, Sample, SampleStatus
from tests import tiny, tiny_vision
from tests.unit.rollout.scripted import Tokenizer


@dataclass
class Answers:
    """Engine that answers with the next of `generations` and records its requests."""

    generations: list[Generation | EngineError]
    asked: list[dict] = field(default_factory=list)
    questions: list[RoutingQuery | None] = field(default_factory=list)
    images: list[Sequence[PromptImage]] = field(default_factory=list)

    async def generate(
        self,
        input_ids: IntArray,
        params: SamplingParams,
        *,
        rid: str,
        priority: int = 0,
        timeout_s: float | None = None,
        routing: RoutingQuery | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Generation:
        self.questions.append(routing)
        self.images.append(images)
        self.asked.append({"ids": input_ids.tolist(), "params": params, "rid": rid, "priority": priority, "timeout_s": timeout_s})
        answer = self.generations.pop(0)
        if isinstance(answer, EngineError):
            raise answer
        return answer


def answer(ids: list[int], reason: FinishReason = "stop", version: int = 0, logprob: float = -1.0, engine: int | None = None) -> Generation:
    return Generation(np.array(ids, np.int32), np.full(len(ids), logprob, np.float32), reason, version, 3, 0, "", engine=engine)


def sample(index: int = 7) -> Sample:
    return Sample(index, 2, "prompt", np.array([1, 2, 3], np.int32))


PARAMS = SamplingParams(max_new_tokens=8)


async def test_a_fresh_sample_is_filled_in():
    engine = Answers([answer([5, 6], version=4)])
    done = await SingleTurn(engine, Tokenizer(), timeout_s=9.0)(sample(), PARAMS)
    assert engine.asked == [{"ids": [1, 2, 3], "params": PARAMS, "rid": "7-0", "priority": -7, "timeout_s": 9.0}]
    assert (done.status, done.finish_reason, done.response) == (SampleStatus.COMPLETED, "stop", "5 6")
    assert done.response_ids.tolist() == [5, 6]
    assert done.versions.tolist() == [4, 4]
    assert done.engine_logprobs.tolist() == [-1, -1]
    assert done.loss_mask.tolist() == [1, 1]
    assert [array.dtype for array in (done.response_ids, done.versions, done.engine_logprobs, done.loss_mask)] == [
        np.int32, np.int32, np.float32, np.int8,
    ]  # fmt: skip
    assert [span.name for span in done.spans] == ["generate"]


async def test_images_are_resized_for_an_engine_that_would_resize_them_in_its_own_way(tmp_path: Path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(tiny_vision.PROCESSOR))
    images = ResizedImages(ImageProcessor(tmp_path))
    given = PromptImage("a.png", tiny_vision.png(33, 41), "digest", 1, 5, 4)
    engine = Answers([answer([5]), answer([5])])
    plain = await SingleTurn(engine, Tokenizer(), timeout_s=9)(replace(sample(), images=(given,)), PARAMS)
    resized = await SingleTurn(engine, Tokenizer(), timeout_s=9, images=images)(replace(sample(), images=(given,)), PARAMS)
    assert engine.images == [(given,), (images.of(given),)]
    assert plain.images == resized.images == (given,), "the trainer computes the same pixels from the file"
    broken = replace(given, data=b"no image", digest="other")
    failed = await SingleTurn(engine, Tokenizer(), timeout_s=9, images=images)(replace(sample(), images=(broken,)), PARAMS)
    assert failed.status is SampleStatus.FAILED
    assert failed.error is not None and "cannot process a.png" in failed.error


async def test_an_aborted_sample_continues_with_new_weights_and_every_token_keeps_its_version():
    engine = Answers([answer([5, 6], "abort", version=0, logprob=-1), answer([7], "stop", version=3, logprob=-2)])
    generate = SingleTurn(engine, Tokenizer(), timeout_s=9)
    begun = await generate(sample(), PARAMS)
    assert begun.status is SampleStatus.ABORTED
    done = await generate(begun, PARAMS)
    assert engine.asked[1]["ids"] == [1, 2, 3, 5, 6]
    assert engine.asked[1]["params"].max_new_tokens == 6
    assert engine.asked[1]["rid"] != engine.asked[0]["rid"]
    assert done.versions.tolist() == [0, 0, 3]
    assert done.engine_logprobs.tolist() == [-1, -1, -2]
    assert done.response == "5 6 7"


async def test_a_response_over_a_weight_sync_has_the_version_of_each_token():
    kept, rest = answer([5, 6], "abort", version=3), answer([7], version=4)
    kept.token_versions = np.array([2, 3], np.int32)
    engine = Answers([kept, rest])
    generate = SingleTurn(engine, Tokenizer(), timeout_s=9)
    done = await generate(await generate(sample(), PARAMS), PARAMS)
    assert done.versions.tolist() == [2, 3, 4] and done.versions.dtype == np.int32


async def test_each_token_keeps_the_experts_of_the_version_that_computed_it_first():
    shape = RoutingShape(num_layers=2, moe_layers=(1,), num_experts=8, top_k=2)
    begun, rest = np.arange(8, dtype=np.uint8).reshape(4, 1, 2), np.arange(2, dtype=np.uint8).reshape(1, 1, 2)
    first, second = answer([5, 6], "abort", version=0), answer([7], "stop", version=3)
    first.routed_experts, second.routed_experts = begun, rest
    engine = Answers([first, second, answer([8])])
    generate = SingleTurn(engine, Tokenizer(), timeout_s=9, routing=shape)
    done = await generate(await generate(sample(), PARAMS), PARAMS)
    assert engine.questions == [RoutingQuery(shape, num_known=0, affinity=2), RoutingQuery(shape, num_known=4, affinity=2)]
    assert done.routed_experts is not None and np.array_equal(done.routed_experts, np.concatenate([begun, rest]))
    assert len(done.routed_experts) == len(done.tokens) - 1
    unasked = await generate.without_routing()(sample(), PARAMS)
    assert engine.questions[2] is None and unasked.routed_experts is None
    assert len({asked["rid"] for asked in engine.asked}) == 3


async def test_spans_tell_which_engine_sampled_which_tokens():
    engine = Answers([answer([5, 6], "abort", engine=1), EngineError("gone"), answer([7], engine=0)])
    generate = SingleTurn(engine, Tokenizer(), timeout_s=9)
    done = await generate(await generate(await generate(sample(), PARAMS), PARAMS), PARAMS)
    assert [(span.engine, span.first_token, span.num_tokens) for span in done.spans] == [(1, 0, 2), (None, 2, 0), (0, 2, 1)]
    assert done.engine == 0
    assert all(span.start_s <= span.end_s for span in done.spans)


async def test_min_new_tokens_counts_the_whole_response():
    engine = Answers([answer([5, 6], "abort"), answer([7])])
    generate = SingleTurn(engine, Tokenizer(), timeout_s=9)
    params = SamplingParams(max_new_tokens=8, min_new_tokens=3)
    await generate(await generate(sample(), params), params)
    assert [asked["params"].min_new_tokens for asked in engine.asked] == [3, 1]


@pytest.mark.parametrize(("max_new_tokens", "max_context_len"), [(2, None), (8, 5)])
async def test_nothing_left_is_truncated_without_a_request(max_new_tokens: int, max_context_len: int | None):
    engine = Answers([answer([5, 6], "abort")])
    generate = SingleTurn(engine, Tokenizer(), timeout_s=9, max_context_len=max_context_len)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    done = await generate(await generate(sample(), params), params)
    assert (done.status, done.finish_reason) == (SampleStatus.TRUNCATED, "length")
    assert len(engine.asked) == 1


async def test_the_context_limit_counts_prompt_and_response():
    engine = Answers([answer([5], "length")])
    done = await SingleTurn(engine, Tokenizer(), timeout_s=9, max_context_len=4)(sample(), PARAMS)
    assert engine.asked[0]["params"].max_new_tokens == 1
    assert done.status is SampleStatus.TRUNCATED


async def test_an_engine_error_is_the_sample_s_failure_and_its_tokens_stay():
    engine = Answers([answer([5, 6], "abort"), EngineError("engine http://x: request 7-1: failed 4 times")])
    generate = SingleTurn(engine, Tokenizer(), timeout_s=9)
    failed = await generate(await generate(sample(), PARAMS), PARAMS)
    assert (failed.status, failed.error) == (SampleStatus.FAILED, "engine http://x: request 7-1: failed 4 times")
    assert failed.response_ids.tolist() == [5, 6]


async def test_a_stop_string_of_an_earlier_turn_stays_in_the_text():
    engine = Answers([answer([5, 6]), answer([7, 6]), answer([8], "length")])
    generate, params = SingleTurn(engine, Tokenizer(), timeout_s=9), SamplingParams(max_new_tokens=8, stop=("6",))
    turns = [(await generate(sample_, params)).response for sample_ in [sample()] * 3]
    assert turns == ["5 ", "5 6 7 ", "5 6 7 6 8"]


async def test_a_stop_string_is_trimmed_from_the_text_and_never_from_the_ids():
    params = SamplingParams(max_new_tokens=8, stop=("6",))
    done = await SingleTurn(Answers([answer([5, 6])]), Tokenizer(), timeout_s=9)(sample(), params)
    assert (done.response, done.response_ids.tolist()) == ("5 ", [5, 6])


@pytest.mark.parametrize(
    ("before", "last", "stop", "rest"),
    [
        ("a\n", "\nb", ("\n\n",), "a"),
        ("a", " b", ("x",), "a b"),
        ("one", "; two.", (".", ";"), "one"),
        ("one; two", ".", (".", ";"), "one; two"),
        ("one; two", "", (";",), "one; two"),
    ],
)
def test_text_ends_before_the_stop_string_that_the_last_token_completed(before: str, last: str, stop: tuple[str, ...], rest: str):
    assert trim(before + last, stop, len(before)) == rest


@pytest.mark.parametrize("length", [5, 3000])
async def test_text_is_decoded_from_all_ids_at_once_so_that_split_characters_are_whole(length: int):
    """A multi-byte character that an abort splits is decoded correctly; long responses are decoded in a thread."""
    tokenizer = tiny.tokenizer()
    ids = tokenizer("né 答 " + "x" * length, add_special_tokens=False).input_ids
    cut = next(at for at in range(1, len(ids)) if "\ufffd" in tokenizer.decode(ids[:at]))
    engine = Answers([answer(ids[:cut], "abort"), answer([*ids[cut:], tiny.EOS_ID])])
    generate = SingleTurn(engine, tokenizer, timeout_s=9)
    params = SamplingParams(max_new_tokens=len(ids) + 9)
    done = await generate(await generate(sample(), params), params)
    assert done.response == "né 答 " + "x" * length, "special tokens are left out"


def test_sampling_parameters_are_the_flags():
    flags = RolloutFlags(
        rollout_max_response_len=3,
        rollout_temperature=0.7,
        rollout_top_p=0.9,
        rollout_top_k=5,
        rollout_min_p=0.1,
        rollout_stop=["x"],
        rollout_stop_token_ids=[4],
    )
    assert sampling_params(flags) == SamplingParams(
        max_new_tokens=3, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("x",), stop_token_ids=(4,)
    )
