"""API through which agents call the policy: translates its requests to chat completions, and the answers back."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fuligo.engines.generation import Tokenizer
from fuligo.gateway.completion import Completion


class ErrorContent(Protocol):
    """Content of an error, as the API's clients read it."""

    def __call__(self, message: str, kind: str = ..., *, param: str | None = None, code: str | None = None) -> dict[str, Any]: ...


@dataclass(slots=True, frozen=True)
class Dialect:
    """One API."""

    read: Callable[[bytes], Mapping[str, Any]]
    """Turns a request into the body of a request for a chat completion; raises `InvalidRequest`."""
    body: Callable[[Completion, Tokenizer], dict[str, Any]]
    """Whole answer."""
    events: Callable[[Completion, Tokenizer], Iterator[bytes]]
    """Answer as server-sent events."""
    error: ErrorContent
