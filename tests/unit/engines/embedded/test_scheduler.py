from collections.abc import Callable

import pytest
import torch

from fuligo.engines.embedded.kv_cache import KVCache
from fuligo.engines.embedded.model import EngineModel
from fuligo.engines.embedded.request import Request
from fuligo.engines.embedded.scheduler import Scheduler, packs
from tests import tiny

MakeScheduler = Callable[..., Scheduler]
MakeRequest = Callable[..., Request]
RunAll = Callable[..., list[Request]]


def test_seeded_tokens_do_not_depend_on_what_else_is_decoded(
    make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll
) -> None:
    prompts = [[5, 6, 7], [5, 6, 7], [9] * 40, [11, 12], list(range(3, 70))]
    alone = []
    for number, prompt in enumerate(prompts):
        request = make_request(prompt, 50, seed=number)
        run_all(make_scheduler(), [request])
        alone.append(request.output_ids)
    for slots in (2, 8):
        together = [make_request(prompt, 50, seed=number) for number, prompt in enumerate(prompts)]
        run_all(make_scheduler(slots), together)
        assert [request.output_ids for request in together] == alone


def test_the_schedule_is_a_function_of_the_waiting_set(make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll) -> None:
    """Equal bit for bit, also on a scheduler that ran other requests before."""
    scheduler = make_scheduler(4)

    def wave() -> list[tuple[list[int], list[float]]]:
        requests = [make_request([3 + number % 3, 8], 5 + 7 * number, seed=number, priority=-number) for number in range(9)]
        run_all(scheduler, requests)
        return [(request.output_ids, request.logprobs) for request in requests]

    first = wave()
    run_all(scheduler, [make_request([7] * length, 11) for length in (1, 90, 33)])
    assert wave() == first


def test_waiting_requests_start_by_priority_then_arrival(make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll) -> None:
    requests = [make_request([4, 5], 3, priority=priority, ignore_eos=True) for priority in (0, 2, 1, 2)]
    ended = run_all(make_scheduler(1), requests)
    assert [request.arrival for request in ended] == [1, 3, 2, 0]


def test_a_shared_prompt_is_prefilled_once(
    make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler(4)
    prefilled: list[list[int]] = []
    prefill = scheduler._prefill
    monkeypatch.setattr(scheduler, "_prefill", lambda requests: (prefilled.extend(r.input_ids for r in requests), prefill(requests))[1])
    group = [make_request([5, 6, 7, 8], 20, seed=number, ignore_eos=True) for number in range(6)]
    other = make_request([9, 9], 20, ignore_eos=True)
    run_all(scheduler, [*group, other])
    assert prefilled == [[5, 6, 7, 8], [9, 9]], "also those admitted later copy the prompt of one that is still running"
    assert [request.cached_tokens for request in group] == [0, 3, 3, 3, 3, 3]


def test_a_leader_that_ends_at_once_still_passes_its_prompt_on(
    make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll
) -> None:
    leader, follower = make_request([5, 6, 7], 1), make_request([5, 6, 7], 6, seed=3)
    run_all(make_scheduler(), [leader, follower])
    alone = make_request([5, 6, 7], 6, seed=3)
    run_all(make_scheduler(), [alone])
    assert follower.cached_tokens == 2
    assert follower.output_ids == alone.output_ids


def test_no_more_run_than_rows_and_reserved_tokens_allow(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_running_requests=3, max_total_tokens=128)
    for number in range(5):
        scheduler.enqueue(make_request([4 + number], 30, ignore_eos=True))
    scheduler.step()
    assert scheduler.num_running == 3
    tight = make_scheduler(max_running_requests=3, max_total_tokens=64)
    for number in range(5):
        tight.enqueue(make_request([4 + number], 30, ignore_eos=True))
    tight.step()
    assert tight.num_running == 2


class TestEnds:
    def test_length(self, make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll) -> None:
        request = make_request([5], 7, ignore_eos=True)
        run_all(make_scheduler(), [request])
        assert request.finish_reason == {"type": "length", "length": 7}
        assert len(request.output_ids) == len(request.logprobs) == 7

    def test_stop_token_is_kept(self, make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll) -> None:
        free = make_request([5], 30, ignore_eos=True)
        run_all(make_scheduler(), [free])
        stop = free.output_ids[12]
        end = free.output_ids.index(stop) + 1
        stopped = make_request([5], 30, ignore_eos=True, stop_token_ids=(stop,))
        run_all(make_scheduler(), [stopped])
        assert stopped.output_ids == free.output_ids[:end]
        assert stopped.finish_reason == {"type": "stop", "matched": stop}

    def test_end_of_text_ends_unless_ignored(
        self, make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll, engine_model: EngineModel
    ) -> None:
        requests = [make_request([5, number], 200, seed=number) for number in range(3, 40)]
        run_all(make_scheduler(64), requests)
        ended = [request for request in requests if request.finish_reason == {"type": "stop", "matched": tiny.EOS_ID}]
        assert ended
        assert all(request.output_ids.index(tiny.EOS_ID) == len(request.output_ids) - 1 for request in ended)
        ignoring = [make_request(r.input_ids, 200, seed=r.seed, ignore_eos=True) for r in ended]
        run_all(make_scheduler(64), ignoring)
        for request, before in zip(ignoring, ended):
            assert len(request.output_ids) == 200
            assert request.output_ids[: len(before.output_ids)] == before.output_ids

    def test_min_new_tokens_holds_off_the_end(self, make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll) -> None:
        every_token = tuple(range(1, 400))
        request = make_request([5], 30, stop_token_ids=every_token, min_new_tokens=4)
        run_all(make_scheduler(), [request])
        assert request.output_ids[:4] == [0] * 4, "token 0 is the only one that does not end the response"
        assert request.finish_reason is not None and request.finish_reason["type"] == "stop"

    def test_stop_string_across_tokens(
        self, make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll, engine_model: EngineModel
    ) -> None:
        assert engine_model.tokenizer is not None
        free = make_request([5, 9], 60, ignore_eos=True, seed=4)
        run_all(make_scheduler(), [free])
        texts = [engine_model.tokenizer.decode([token]) for token in free.output_ids]
        place = next(i for i in range(5, 59) if all("\ufffd" not in t and t.strip() for t in texts[i : i + 2]))
        stop = texts[place][-1] + texts[place + 1][0]
        stopped = make_request([5, 9], 60, ignore_eos=True, seed=4, stop=("never so", stop))
        run_all(make_scheduler(), [stopped])
        assert stopped.finish_reason == {"type": "stop", "matched": stop}
        assert stopped.output_ids == free.output_ids[: len(stopped.output_ids)], "the ids are not trimmed"
        assert stop in engine_model.tokenizer.decode(stopped.output_ids)
        assert stop not in engine_model.tokenizer.decode(stopped.output_ids[:-1])


def test_an_abort_keeps_tokens_and_a_continuation_stays_on_the_stream(
    make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll
) -> None:
    whole = make_request([5, 6, 7], 40, seed=8, ignore_eos=True)
    run_all(make_scheduler(), [whole])
    scheduler = make_scheduler(1)
    cut, waiting = make_request([5, 6, 7], 40, seed=8, ignore_eos=True), make_request([9], 5)
    scheduler.enqueue(cut)
    scheduler.enqueue(waiting)
    for _ in range(9):
        scheduler.step()
    assert scheduler.abort(lambda request: True, "enough") == [cut, waiting]
    assert (scheduler.num_running, scheduler.waiting, scheduler.cache.reserved_tokens) == (0, [], 0)
    assert cut.output_ids == whole.output_ids[: len(cut.output_ids)] != []
    assert waiting.output_ids == []
    rest = make_request(cut.input_ids + cut.output_ids, 40 - len(cut.output_ids), seed=8, ignore_eos=True)
    run_all(scheduler, [rest])
    assert cut.output_ids + rest.output_ids == whole.output_ids


@pytest.fixture(scope="module", params=["qwen3", "qwen3_next"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineModel:
    directory = tiny.save_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return EngineModel(str(directory), torch.device("cpu"), torch.float32)


def test_an_abort_of_some_moves_the_rows_of_the_others(served: EngineModel, make_request: MakeRequest, run_all: RunAll) -> None:
    def scheduler() -> Scheduler:
        return Scheduler(served, KVCache(served.cache_shape, 100_000, torch.float32, torch.device("cpu")), 5)

    def requests() -> list[Request]:
        return [make_request([5, 6, number], 40, seed=number, ignore_eos=True) for number in range(3, 9)]

    undisturbed, disturbed = requests(), requests()
    run_all(scheduler(), undisturbed)
    interrupted = scheduler()
    for request in disturbed:
        interrupted.enqueue(request)
    for _ in range(5):
        interrupted.step()
    gone = [disturbed[0], disturbed[2], disturbed[5]]  # the last one waits
    assert interrupted.abort(lambda request: request in gone, "enough") == gone
    run_all(interrupted, [])
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after.output_ids == before.output_ids[: len(after.output_ids)]
        assert len(after.output_ids) == (40 if after not in gone else 6 if after is not gone[2] else 0)


def test_retracted_requests_continue_as_if_uninterrupted(make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll) -> None:
    def requests() -> list[Request]:
        return [make_request([5, 6, number], 30, seed=number, ignore_eos=True) for number in range(3, 8)]

    undisturbed = requests()
    run_all(make_scheduler(), undisturbed)
    disturbed = requests()
    scheduler = make_scheduler()
    for request in disturbed:
        scheduler.enqueue(request)
    for _ in range(11):
        scheduler.step()
    scheduler.retract()
    assert (scheduler.num_running, len(scheduler.waiting)) == (0, 5)
    run_all(scheduler, [])
    assert [r.output_ids for r in disturbed] == [r.output_ids for r in undisturbed]
    torch.testing.assert_close([r.logprobs for r in disturbed], [r.logprobs for r in undisturbed], atol=1e-5, rtol=0)


def test_logits_that_are_not_finite_fail_their_request_and_poison_no_other(
    make_scheduler: MakeScheduler, make_request: MakeRequest, run_all: RunAll, engine_model: EngineModel
) -> None:
    embedding = engine_model.module.get_input_embeddings().weight
    poisoned, healthy, later = (
        make_request([7, 7], 20, ignore_eos=True),
        make_request([5], 20, seed=1, stop_token_ids=(7,)),
        make_request([5], 20),
    )
    scheduler = make_scheduler()
    before = embedding[7].clone()
    with torch.no_grad():
        embedding[7] = float("nan")
    try:
        run_all(scheduler, [poisoned, healthy])
    finally:
        with torch.no_grad():
            embedding[7] = before
    assert poisoned.error is not None and "non-finite" in poisoned.error
    run_all(scheduler, [later])
    assert later.error is None and later.finish_reason is not None


def test_packs_are_bounded_and_ordered_by_length(make_request: MakeRequest) -> None:
    requests = [make_request([1] * length) for length in (5, 90, 3, 40, 3, 60)]
    assert [[r.num_tokens for r in pack] for pack in packs(requests, 64)] == [[3, 3, 5, 40], [60], [90]]
