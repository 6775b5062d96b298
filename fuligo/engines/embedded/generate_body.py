"""Server side of `/generate`, with SGLang's names: parses a body into requests, and builds the answer of an ended request."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest

from fuligo.engines.answers import decoded_images
from fuligo.engines.embedded.engine import EmbeddedEngine
from fuligo.engines.embedded.model import EngineModel
from fuligo.engines.embedded.request import Request
from fuligo.engines.generation import SamplingParams, trim
from fuligo.engines.http_access import unless_gone
from fuligo.engines.openai_format import json_object
from fuligo.errors import DataError
from fuligo.models.vision.placing import completed, place_images
from fuligo.models.vision.processor import TokenGrid, image_digest
from fuligo.types import PromptImage

PER_REQUEST = ("input_ids", "sampling_params", "rid")
"""Fields that may be lists, with one entry per request, in the batch form."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("text", "input_embeds", "token_ids_logprob", "lora_path"), (None,)),
    **dict.fromkeys(("stream", "return_hidden_states", "return_routed_experts"), (None, False)),
    **dict.fromkeys(("routed_experts_start_len", "top_logprobs_num"), (None, 0)),
    "model": (None,),  # sglang-router adds this field and those below, with its own defaults
    **dict.fromkeys(("background", "no_logs", "return_bytes", "return_entropy"), (None, False)),
}
"""Fields that would change the answer, accepted only with these neutral values."""
HARMLESS = {
    "image_data", "return_logprob", "logprob_start_len", "priority", "extra_key", "session_id", "return_text_in_logprobs", "log_metrics",
    "routing_key",
}  # fmt: skip
"""Fields that are read, or accepted and ignored."""


def parse_requests(raw: bytes, model: EngineModel, new_waiter: Callable[[], Any]) -> tuple[list[Request], bool]:
    """Return the requests of a body, and whether it has the batch form.

    `new_waiter`: makes the `waiter` of a request. Raises ValueError if the body is malformed, or the model cannot answer it.
    """
    body = json_object(raw)
    for name in body.keys() - HARMLESS - set(PER_REQUEST):
        if name not in NEUTRAL:
            raise ValueError(f"unknown field {name}; remove it")
        if body[name] not in NEUTRAL[name]:
            raise ValueError(f"{name}={body[name]!r:.50} is not supported by the embedded engine; remove it")
    ids, params, rids, priority = (body.get(name) for name in (*PER_REQUEST, "priority"))
    score_start = body.get("logprob_start_len")
    if not isinstance(score_start, int | None):
        raise ValueError(f"logprob_start_len is {score_start!r:.50}; it must be one integer, also for a batch")
    score_start = None if score_start == -1 else score_start
    if not isinstance(ids, list) or not ids:
        raise ValueError("input_ids must be a list of token ids, or a list of such lists")
    images = decoded_images(body["image_data"]) if body.get("image_data") else []
    if not isinstance(ids[0], list):
        return [_request(ids, params, rids, priority, score_start, model, new_waiter(), images)], False
    if images:
        raise ValueError("image_data of a batch is not supported by the embedded engine; send one request for each prompt")
    params = params if isinstance(params, list) else [params] * len(ids)
    rids = rids if isinstance(rids, list) else [None if rids is None else f"{rids}_{i}" for i in range(len(ids))]
    if len(params) != len(ids) or len(rids) != len(ids):
        raise ValueError(f"a batch of {len(ids)} input_ids with {len(params)} sampling_params and {len(rids)} rids: the lengths must agree")
    return [_request(*one, priority, score_start, model, new_waiter()) for one in zip(ids, params, rids)], True


def _request(
    ids: Any, params: Any, rid: Any, priority: Any, score_start: int | None, model: EngineModel, waiter: Any, images: Sequence[bytes] = ()
) -> Request:
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError("input_ids must be a non-empty list of integers")
    if not isinstance(priority, int | None) or not isinstance(rid, str | None):
        raise ValueError("priority must be an integer and rid a string")
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        raise ValueError(f"input_ids range from {min(ids)} to {max(ids)}; the vocabulary has ids 0 to {model.vocab_size - 1}")
    ids, placed = _placed(ids, images, model)
    sampling = _sampling(params, len(ids), score_start)
    if sampling.stop and model.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, but the model's directory has none; use stop_token_ids")
    return Request(
        rid=secrets.token_hex(16) if rid is None else rid,
        input_ids=ids,
        params=sampling,
        end_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else model.end_ids),
        seed=(secrets.randbits(64) if sampling.sampling_seed is None else sampling.sampling_seed) % 2**64,
        priority=priority or 0,
        waiter=waiter,
        score_start=score_start,
        images=placed,
    )


def _placed(ids: list[int], images: Sequence[bytes], model: EngineModel) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return the ids with all tokens of the images, and the images with the positions of these tokens."""
    if not images:
        return ids, ()
    if model.vision is None or model.image_token_id is None:
        raise ValueError(f"image_data: {model.path} takes no images: {model.no_images_because}")
    try:
        patches = [model.vision.processor.patches(data, image_digest(data)) for data in images]
        side = model.vision.processor.merge_size
        grids = [TokenGrid(each.num_rows // side, each.num_columns // side) for each in patches]
        names = [f"image {number}" for number in range(len(images))]
        ids = completed(ids, grids, model.image_token_id)
        return ids, place_images(ids, images, grids, model.image_token_id, names)
    except DataError as error:
        raise ValueError(f"image_data: {error}") from error


def _sampling(params: Any, num_tokens: int, score_start: int | None) -> SamplingParams:
    if score_start is None:
        return SamplingParams.from_json({} if params is None else params)
    if not isinstance(params, dict) or params.get("max_new_tokens") != 0:
        raise ValueError("logprob_start_len requests log-probabilities of the input, which excludes sampling; set max_new_tokens to 0")
    if not 0 <= score_start < num_tokens - 1:
        raise ValueError(f"logprob_start_len is {score_start}; at least one of the {num_tokens} input_ids must follow it")
    return replace(SamplingParams.from_json({**params, "max_new_tokens": 1}), max_new_tokens=0)


async def ended_while_connected(http: HttpRequest, requests: Sequence[Request], engine: EmbeddedEngine) -> bool:
    """Wait until all requests have ended, and return True; if their client disconnects first, abort them and return False."""
    if await unless_gone(http, asyncio.wait([request.waiter for request in requests])) is not None:
        return True
    engine.abort(requests.__contains__)
    return False


def answer(request: Request, model: EngineModel) -> dict[str, Any]:
    """Return SGLang's JSON object for an ended request."""
    assert request.finish_reason is not None
    text = "" if model.tokenizer is None else str(model.tokenizer.decode(request.output_ids, skip_special_tokens=True))
    matched = request.finish_reason.get("matched")
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish_reason,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": len(request.output_ids),
        "cached_tokens": request.cached_tokens,
        "weight_version": str(request.weight_version),
        "e2e_latency": time.perf_counter() - request.arrived_s,
        "output_token_logprobs": [(logprob, token, None) for logprob, token in zip(request.logprobs, request.output_ids)],
    }
    if request.score_start is not None:
        scored = request.input_ids[request.score_start :]
        meta["input_token_logprobs"] = [(score, token, None) for score, token in zip([None, *request.input_logprobs], scored)]
    return {"text": trim(text, [matched]) if isinstance(matched, str) else text, "output_ids": request.output_ids, "meta_info": meta}
