"""Continuous batching and sampling. A step depends only on the waiting and running requests, never on the clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from fuligo.engines.embedded.attention import AttentionPlan, Segment
from fuligo.engines.embedded.kv_cache import KVCache, KVPool
from fuligo.engines.embedded.model import EngineModel, ordinary_log_softmax
from fuligo.engines.embedded.request import Request
from fuligo.engines.generation import matched_stop
from fuligo.models.sampling import Filter, filtered, inverse_cdf, uniforms
from fuligo.models.vision.forward import row_images
from fuligo.models.vision.positions import rotary_shift, row_positions

GREEDY_BELOW = 1e-6
"""Temperature below which the most likely token is taken, with its log-probability at temperature 1."""


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of a batch's rows, as tensors."""

    seeds: NDArray[np.uint64]
    """[N] seed of each row's sampling stream."""
    temperature: torch.Tensor | None
    """[N, 1] sampling temperature of each row; None if all are 1."""
    filter: Filter | None
    """Limits by top-k, top-p and min-p; None if no row has any."""
    suppressed: list[tuple[int, list[int]]]
    """(row, end tokens that it must not sample yet) of rows below their `min_new_tokens`."""

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int, device: torch.device) -> SamplingBatch:
        params = [request.params for request in requests]
        greedy = [p.temperature < GREEDY_BELOW for p in params]
        temperatures = [1.0 if g else p.temperature for p, g in zip(params, greedy)]
        top_k = [1 if g else p.top_k if p.top_k > 0 else vocab_size for p, g in zip(params, greedy)]
        cut = [i for i, p in enumerate(params) if top_k[i] < vocab_size or p.top_p < 1 or p.min_p > 0]

        def column(values: list[float] | list[int]) -> torch.Tensor:
            return torch.tensor(values, device=device)[:, None]

        return cls(
            seeds=np.array([request.seed for request in requests], np.uint64),
            temperature=column(temperatures) if any(t != 1 for t in temperatures) else None,
            filter=Filter(
                torch.tensor(cut, device=device),
                column([params[i].top_p for i in cut]),
                column([top_k[i] for i in cut]),
                column([params[i].min_p for i in cut]),
            )
            if cut
            else None,
            suppressed=[
                (i, sorted(token for token in r.end_ids if token < vocab_size))
                for i, r in enumerate(requests)
                if len(r.output_ids) < r.params.min_new_tokens and r.end_ids
            ],
        )


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    positions: NDArray[np.int64],
    log_softmax: Callable[[torch.Tensor], torch.Tensor] = ordinary_log_softmax,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row.

    Args:
        logits: [N, V]
        positions: [N] positions of the tokens to sample, counted from the start of the prompt
        log_softmax: [N, V] float32 -> [N, V]

    Returns:
        Tokens [N] int64, and their log-probabilities [N] float32: log softmax(logits / T) over the full vocabulary, before
        top-p, top-k, min-p and the suppression of end tokens
    """
    logits = logits.float()
    if batch.temperature is not None:
        logits = logits / batch.temperature
    logprobs = log_softmax(logits)
    probs = logprobs.exp()
    for row, tokens in batch.suppressed:
        probs[row, tokens] = 0
    if batch.filter is not None:
        probs[batch.filter.rows] = filtered(probs[batch.filter.rows], batch.filter)
    uniform = torch.from_numpy(uniforms(batch.seeds, positions)).to(logits.device)
    tokens = inverse_cdf(probs, uniform)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


MAX_PREFILL_TOKENS = 8192
"""Largest number of tokens in a packed prefill; a longer prompt is prefilled by itself."""
MAX_SCORED_TOKENS = 1024
"""Largest number of tokens in a packed scoring pass, which holds the logits of its scored tokens; a longer request is scored by itself."""


@dataclass(slots=True)
class DecodeBatch:
    """Running requests in batch order, kept from step to step until a request joins, leaves, or changes its pool."""

    requests: list[Request]
    input_ids: torch.Tensor
    """[N] int64, the newest token of each request."""
    positions: NDArray[np.int64]
    """[N] positions of those tokens in their sequences."""
    shifts: NDArray[np.int64]
    """[N] rotary position minus position; 0 without images."""
    rows: NDArray[np.int64]
    """[N] row of each request in its pool."""
    pools: list[KVPool]
    bounds: list[tuple[int, int]]
    """Start and end of each pool's requests in the batch."""
    sampling: SamplingBatch

    def outgrown(self) -> bool:
        """Return whether a row has no room for its newest token."""
        return any(self.positions[start:end].max() >= pool.capacity for pool, (start, end) in zip(self.pools, self.bounds))


class Scheduler:
    """Schedule of requests over prefill and decode steps. Called only by the engine's thread."""

    def __init__(self, model: EngineModel, cache: KVCache, max_running_requests: int) -> None:
        self.model = model
        self.cache = cache
        self.max_running_requests = max_running_requests
        self.waiting: list[tuple[tuple[int, int], Request]] = []
        """Heap by `Request.order`."""
        self._batch: DecodeBatch | None = None
        self._by_prompt: dict[bytes, list[Request]] = {}
        """Running requests whose rows hold the prompt's keys and values under the current weights, by prompt."""
        self._ended: list[Request] = []

    @property
    def running(self) -> list[Request]:
        return [request for pool in self.cache.pools for request in pool.requests]

    @property
    def num_running(self) -> int:
        return sum(len(pool.requests) for pool in self.cache.pools)

    def enqueue(self, request: Request) -> None:
        heapq.heappush(self.waiting, (request.order, request))

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Score waiting requests, prefill those that fit, then decode one token of every running request; return those that have ended.

        A prefill samples a token as well.
        """
        taken = [entry for entry in self.waiting if entry[1].score_start is not None]
        if taken:
            self.waiting = [entry for entry in self.waiting if entry[1].score_start is None]
            heapq.heapify(self.waiting)
        for packed in packs([request for _, request in sorted(taken)], MAX_SCORED_TOKENS):
            self._score(packed)
        fresh, copies = self._admit()
        for packed in packs(fresh, MAX_PREFILL_TOKENS):
            self._prefill(packed)
        self._copy_prompts(copies)
        self._release_ended()
        if self.num_running:
            self._decode()
            self._release_ended()
        ended, self._ended = self._ended, []
        return ended

    @torch.inference_mode()  # the pools, whose rows move, are inference tensors
    def abort(self, which: Callable[[Request], bool], message: str) -> list[Request]:
        """End and return the requests, running and waiting, that `which` selects; they keep the tokens sampled so far."""
        running = [request for request in self.running if which(request)]
        waiting = [request for _, request in sorted(self.waiting) if which(request)]
        self.waiting = [entry for entry in self.waiting if not which(entry[1])]
        heapq.heapify(self.waiting)
        self._leave(running)
        for request in running + waiting:
            request.finish_reason = {"type": "abort", "message": message}
        return running + waiting

    @torch.inference_mode()
    def retract(self) -> None:
        """Move all running requests back to the queue; their keys and values are recomputed when they resume."""
        running = self.running
        self._leave(running)
        for request in running:
            self.enqueue(request)

    def forget_prompts(self) -> None:
        """Stop copying cached prompts into new requests, because the weights changed."""
        self._by_prompt.clear()

    def _score(self, requests: Sequence[Request]) -> None:
        """Compute the log-probabilities of input tokens at temperature 1, without caching keys and values."""
        lengths = [request.num_tokens for request in requests]
        cu_seqlens = [0, *accumulate(lengths)]
        starts = [request.score_start or 0 for request in requests]
        images = [request.images for request in requests]
        positions = row_positions(lengths, images)
        keep = np.concatenate([np.arange(at + start, at + n - 1) for at, start, n in zip(cu_seqlens, starts, lengths)])
        input_ids = torch.tensor([token for request in requests for token in request.input_ids], device=self.model.device)
        kept = self._to_device(keep)
        placed = row_images(cu_seqlens, images, self.model.device)
        logits = self.model.forward(input_ids, self._to_device(positions), AttentionPlan([], cu_seqlens), kept, placed).float()
        scores = self.model.log_softmax(logits).gather(-1, input_ids[kept + 1][:, None])[:, 0]
        for request, own in zip(requests, scores.split([n - 1 - start for n, start in zip(lengths, starts)])):
            request.input_logprobs = own.tolist()
            request.finish_reason = {"type": "length", "length": 0}
            if not own.isfinite().all():
                request.error = "the model produced non-finite logits at the tokens to score"
            self._ended.append(request)

    def _admit(self) -> tuple[list[Request], list[Request]]:
        """Start waiting requests while there is room.

        Return those that need a prefill, and those that copy their prompt's keys and values from a request that runs or is prefilled first.
        """
        fresh: list[Request] = []
        copies: list[Request] = []
        num_running = self.num_running
        while self.waiting and num_running < self.max_running_requests and self.cache.fits(self.waiting[0][1]):
            request = heapq.heappop(self.waiting)[1]
            num_running += 1
            self.cache.add(request)
            self._batch = None
            # Linear attention keeps only its newest state, not the one before the prompt's last token that a copy would start from.
            if request.output_ids or self.cache.shape.recurrent.layers:
                fresh.append(request)
                continue
            sharing = self._by_prompt.setdefault(request.prompt_key, [])
            (copies if sharing else fresh).append(request)
            sharing.append(request)
        return fresh, copies

    def _copy_prompts(self, copies: Sequence[Request]) -> None:
        by_prompt: dict[bytes, list[Request]] = {}
        for request in copies:
            by_prompt.setdefault(request.prompt_key, []).append(request)
        for key, requests in by_prompt.items():
            self.cache.copy_prompt(self._by_prompt[key][0], requests)

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Compute the keys and values of all tokens of `requests`, which are ordered by pool, and sample the next token of each."""
        lengths = np.array([request.num_tokens for request in requests])
        cu_seqlens = [0, *accumulate(lengths.tolist())]
        positions = np.concatenate([np.arange(length) for length in lengths])
        rows = np.repeat(_rows(requests), lengths)
        pools = [(pool, len(list(group))) for pool, group in groupby(self.cache.pool_of(request) for request in requests)]
        ends = [cu_seqlens[end] for end in accumulate(count for _, count in pools)]
        bounds = list(pairwise([0, *ends]))
        plan = AttentionPlan(self._segments([pool for pool, _ in pools], bounds, rows, positions), cu_seqlens)
        input_ids = torch.tensor([token for request in requests for token in (*request.input_ids, *request.output_ids)])
        keep = torch.tensor(cu_seqlens[1:], device=self.model.device) - 1
        images = [request.images for request in requests]
        rotary = self._to_device(row_positions(lengths.tolist(), images))
        placed = row_images(cu_seqlens, images, self.model.device)
        logits = self.model.forward(input_ids.to(self.model.device), rotary, plan, keep, placed)
        sampling = SamplingBatch.of(requests, logits.shape[-1], self.model.device)
        self._append(requests, *sample(logits, sampling, lengths, self.model.log_softmax))

    def _decode(self) -> None:
        batch = self._batch
        if batch is None or batch.outgrown():
            batch = self._build_batch()
        plan = AttentionPlan(self._segments(batch.pools, batch.bounds, batch.rows, batch.positions), None)
        logits = self.model.forward(batch.input_ids, self._to_device(batch.positions + batch.shifts), plan)
        batch.positions = batch.positions + 1
        batch.input_ids, logprobs = sample(logits, batch.sampling, batch.positions, self.model.log_softmax)
        self._batch = batch if not batch.sampling.suppressed else None
        self._append(batch.requests, batch.input_ids, logprobs)

    def _build_batch(self) -> DecodeBatch:
        self.cache.promote()
        pools = self.cache.pools
        requests = self.running
        ends = accumulate(len(pool.requests) for pool in pools)
        return DecodeBatch(
            requests=requests,
            pools=pools,
            bounds=list(pairwise([0, *ends])),
            rows=_rows(requests),
            input_ids=torch.tensor([request.newest_token for request in requests], device=self.model.device),
            positions=np.array([request.num_tokens - 1 for request in requests]),
            shifts=np.array([rotary_shift(request.images) for request in requests]),
            sampling=SamplingBatch.of(requests, self.model.vocab_size, self.model.device),
        )

    def _segments(
        self, pools: Sequence[KVPool], bounds: Sequence[tuple[int, int]], rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> list[Segment]:
        placed = np.concatenate([pool.slots(rows[start:end], positions[start:end]) for pool, (start, end) in zip(pools, bounds)])
        per_token = self.cache.shape.num_blocks
        slots, rows_there, positions_there = self._to_device(placed), self._to_device(rows), self._to_device(positions)
        segments: list[Segment] = []
        for pool, (start, end) in zip(pools, bounds):
            longest, shortest = int(positions[start:end].max()), int(positions[start:end].min())
            own = slots[start * per_token : end * per_token]
            there = rows_there[start:end], own, positions_there[start:end]
            segments.append(Segment(pool, start, end, *there, longest + 1, longest == shortest))
        return segments

    def _append(self, requests: Sequence[Request], tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Add a sampled token to each request, and collect the requests that have ended."""
        scores: list[float] = logprobs.tolist()
        if not math.isfinite(sum(scores)):
            self._fail([request for request, score in zip(requests, scores) if not math.isfinite(score)])
        for request, token, score in zip(requests, tokens.tolist(), scores):
            request.output_ids.append(token)
            request.logprobs.append(score)
            params = request.params
            if token in request.end_ids or len(request.output_ids) >= params.max_new_tokens or params.stop:
                self._finish_if_done(request)

    def _finish_if_done(self, request: Request) -> None:
        token, params = request.output_ids[-1], request.params
        if request.error is not None:
            return
        if token in request.end_ids:
            request.finish_reason = {"type": "stop", "matched": token}
        elif params.stop and len(request.output_ids) >= params.min_new_tokens:
            assert self.model.tokenizer is not None, "parse_requests rejects stop strings without a tokenizer"
            matched = matched_stop(self.model.tokenizer, request.output_ids, params.stop)
            request.finish_reason = {"type": "stop", "matched": matched} if matched else None
        if request.finish_reason is None and len(request.output_ids) >= params.max_new_tokens:
            request.finish_reason = {"type": "length", "length": params.max_new_tokens}
        if request.finish_reason is not None:
            self._ended.append(request)

    def _fail(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.error = f"the model produced non-finite logits after {request.num_tokens} tokens"
            self._ended.append(request)
        self.cache.scrub()

    def _release_ended(self) -> None:
        self._leave([request for request in self._ended if request.pool_capacity])

    def _leave(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        self.cache.remove(requests)
        self._batch = None
        for request in requests:
            sharing = self._by_prompt.get(request.prompt_key, [])
            if request in sharing:
                sharing.remove(request)
                if not sharing:
                    del self._by_prompt[request.prompt_key]

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.model.device)


def packs(requests: Sequence[Request], max_tokens: int) -> Iterator[list[Request]]:
    """Yield packs of requests, each pack with at most `max_tokens` tokens; a longer request is a pack by itself.

    Requests are ordered by length, and thus by pool, since sequences of equal length share an attention call.
    """
    pack: list[Request] = []
    size = 0
    for request in sorted(requests, key=lambda request: request.num_tokens):
        if pack and size + request.num_tokens > max_tokens:
            yield pack
            pack, size = [], 0
        pack.append(request)
        size += request.num_tokens
    if pack:
        yield pack


def _rows(requests: Sequence[Request]) -> NDArray[np.int64]:
    return np.array([request.row for request in requests])
