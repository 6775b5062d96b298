"""Proxy of an environment in another process."""

from typing import Any, ClassVar

from fuligo.environments.environment import AssistantTurn, Environment, Row, Start, Step
from fuligo.environments.isolation.messages import FailureError, Reply, decode_start, decode_step
from fuligo.environments.isolation.workers import ProcessEndedError, Worker, Workers


class IsolatedEnvironment(Environment):
    """Proxy of an environment in a worker process. The first call takes the process; `close` gives it back or kills it.

    The methods raise FailureError if the environment failed or its process ended.
    """

    def __init__(self, row: Row, settings: Any, workers: Workers) -> None:
        super().__init__(row, settings)
        self._workers = workers
        self._worker: Worker | None = None
        self._num_steps: int | None = 0
        """Steps so far, for error messages; None after `restore`."""
        self._last: Reply | None = None

    async def reset(self) -> Start:
        return decode_start((await self._call("reset", name="reset", row=self.row)).result)

    async def restore(self, state: Any) -> None:
        self._num_steps = None
        await self._call("restore", name="restore", row=self.row, state=state)

    async def step(self, turn: AssistantTurn) -> Step:
        if self._num_steps is not None:
            self._num_steps += 1
        place = "step" if self._num_steps is None else f"step {self._num_steps}"
        return decode_step((await self._call(place, name="step", turn=turn)).result)

    async def close(self) -> None:
        """Close the environment. Its process is killed unless another episode can reuse it.

        Raises FailureError if the environment's own `close` failed, or its process ended in it.
        """
        worker, self._worker = self._worker, None
        if worker is None:
            return
        is_reusable = False
        try:
            if worker.is_open and await worker.cancel():
                reply = await worker.call(name="close")
                is_reusable = reply.result.get("is_reusable") is True
        except ProcessEndedError as error:
            raise FailureError(f"its process {error} in close") from None
        finally:
            self._workers.give_back(worker) if is_reusable else self._workers.discard(worker)

    def state(self) -> Any:
        """Return the environment's state after the last call. Raises FailureError if its `state()` failed."""
        assert self._last is not None
        if self._last.state_failure is not None:
            raise FailureError(self._last.state_failure)
        return self._last.state

    async def _call(self, place: str, **request: Any) -> Reply:
        if self._worker is None:
            self._worker = await self._workers.take()
        try:
            self._last = await self._worker.call(**request)
        except ProcessEndedError as error:
            raise FailureError(f"its process {error} in {place}") from None
        return self._last


class ResumableIsolatedEnvironment(IsolatedEnvironment):
    """`IsolatedEnvironment` of a class that is `resumable`."""

    resumable: ClassVar[bool] = True
