"""Client of a remote reward model: `POST {prompt, response, label}` returns the reward as JSON (a number or an object)."""

import asyncio
from typing import Any

import aiohttp

from fuligo.config.secret import Secret, hide_credentials, reveal
from fuligo.errors import RewardError
from fuligo.types import Sample

_FIRST_PAUSE_S = 0.1
_MAX_CONNECTIONS = 128
_WORTH_RETRYING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses of transient errors."""


class RemoteReward:
    """Client of one reward model. Connection errors and the statuses in `_WORTH_RETRYING` are retried with exponential backoff."""

    def __init__(self, url: str | Secret | None, *, timeout_s: float, retries: int) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._retries = retries
        self._session: aiohttp.ClientSession | None = None

    async def judge(self, sample: Sample, response: str) -> Any:
        """Return the JSON of the reply. Raises RewardError if no usable reply arrived in time."""
        if self._url is None:
            raise RewardError("the sample's reward type is remote_rm, but --rm-url is not set; set it")
        last_problem = "no reply"
        try:
            async with asyncio.timeout(self._timeout_s):
                for attempt in range(self._retries + 1):
                    if attempt:
                        await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
                    try:
                        return await self._post(self._url, {"prompt": sample.prompt, "response": response, "label": sample.label})
                    except (aiohttp.ClientError, OSError) as error:
                        last_problem = hide_credentials(f"{type(error).__name__}: {error}")
                        if isinstance(error, aiohttp.ClientResponseError) and error.status not in _WORTH_RETRYING:
                            break
        except TimeoutError:
            raise RewardError(
                f"{self._url} gave no reward within {self._timeout_s:g} s (--rm-timeout-s); last problem: {last_problem}"
            ) from None
        raise RewardError(f"{self._url} gave no reward: {last_problem}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, url: str | Secret, body: dict[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_MAX_CONNECTIONS))
        async with self._session.post(reveal(url), json=body) as response:
            response.raise_for_status()
            try:
                return await response.json(content_type=None)
            except ValueError as error:
                raise RewardError(f"{url} returned invalid JSON: {error}") from error
