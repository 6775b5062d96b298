"""Agent that solves sums in at most two tries. It uses only the `openai` package and contains no code for training."""

from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

_client = AsyncOpenAI(api_key="set per sample", base_url="http://127.0.0.1", http_client=DefaultAsyncHttpxClient())
"""Client with the connections of all samples; a separate client for each sample would cost more than the requests."""


async def solve(session: Any, row: Any) -> dict[str, float]:
    """Ask for the sum, and once more if the answer is wrong. The score is 1 for a right first answer, 0.5 for a right second one."""
    client = _client.with_options(base_url=session.base_url, api_key=session.api_key)
    messages: list[Any] = list(row.prompt)
    for number in (1, 2):
        answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
        if (answer.content or "").endswith(f"\\boxed{{{row.label}}}"):
            return {"score": 1.0 / number, "first_try": float(number == 1)}
        messages += [answer, row.prompt[-1]]
    return {"score": 0.0, "first_try": 0.0}
