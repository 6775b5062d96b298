"""Choice of the processes in which environments live."""

import logging
import sys
from typing import Any

import pytest

from fuligo import callables
from fuligo.config import Config
from fuligo.environments import AssistantTurn, Matches, Row
from fuligo.environments.environment import Environment
from fuligo.environments.isolation.factory import IsolatedFactory, Isolation, environment_factory, environment_problems, is_isolated
from fuligo.environments.isolation.messages import FailureError
from fuligo.environments.load import EnvironmentFactory
from fuligo.errors import ConfigError
from tests.unit.conftest import Isolate
from tests.unit.environments.isolation.misbehaving import Joining, Misbehaving, Shared

PATH = "tests.unit.environments.isolation.misbehaving"


def config(kind: type[Environment], **flags: Any) -> Config:
    return Config.model_validate({"rollout": {"environment": f"{PATH}.{kind.__name__}", **flags}})


@pytest.mark.parametrize(
    ("kind", "path", "isolation", "expected"),
    [
        (Misbehaving, f"{PATH}.Misbehaving", "auto", True),
        (Misbehaving, f"{PATH}.Misbehaving", "process", True),
        (Misbehaving, f"{PATH}.Misbehaving", "none", False),
        (Shared, f"{PATH}.Shared", "auto", False),
        (Misbehaving, callables.register("misbehaving", Misbehaving), "auto", False),
    ],
)
def test_a_class_has_processes_if_it_can(kind: type[Environment], path: str, isolation: Isolation, expected: bool) -> None:
    assert is_isolated(path, kind, isolation) is expected


def test_a_class_that_cannot_have_processes_is_refused_if_it_must(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (problem,) = environment_problems(config(Shared, environment_isolation="process"))
    assert "episodes of Shared share objects (`isolated = False`); set --environment-isolation none" in problem
    with pytest.raises(ConfigError, match="other processes cannot import its class; move it to a module"):
        is_isolated(callables.register("misbehaving", Misbehaving), Misbehaving, "process")
    monkeypatch.setattr(sys, "platform", "darwin")
    caplog.set_level(logging.INFO)
    assert not is_isolated(f"{PATH}.Misbehaving", Misbehaving, "auto")
    assert "environments are not isolated: environment processes need Linux" in caplog.text


async def test_the_flags_reach_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "given")
    factory = environment_factory(config(Misbehaving, environment_memory_mb=512, environment_variables=["MY_API_KEY"]))
    assert isinstance(factory, IsolatedFactory)
    try:
        for prompt, said in (("wants a secret", "given"), ("eats memory", "step raised MemoryError")):
            environment = factory.make(Row(prompt, "", {}, 0))
            try:
                await environment.reset()
                step = await environment.step(AssistantTurn("a"))
                assert step.messages[0]["content"] == said
            except FailureError as failure:
                assert str(failure).startswith(said)
            finally:
                await environment.close()
    finally:
        await factory.close()


def test_without_isolation_environments_live_here() -> None:
    assert isinstance(environment_factory(config(Misbehaving, environment_isolation="none")), EnvironmentFactory)


def test_a_module_whose_import_starts_threads_or_fails_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHEN_IMPORTED", "start a thread")
    with pytest.raises(
        ConfigError, match=r"importing its module started threads .*start them in `reset`; or set --environment-isolation none"
    ):
        environment_factory(config(Misbehaving))
    monkeypatch.setenv("WHEN_IMPORTED", "want a secret")
    monkeypatch.setenv("MY_API_KEY", "given")
    with pytest.raises(
        ConfigError, match=r"raised KeyError: 'MY_API_KEY' .*withheld from its process: .*MY_API_KEY.* \(--environment-variables hands"
    ):
        environment_factory(config(Misbehaving))


async def test_a_match_in_processes_says_what_the_class_lacks(isolate: Isolate) -> None:
    environment = isolate(Joining).make(Row("", "", {}, 0))
    with pytest.raises(FailureError, match="cannot join a match from a separate process; set `isolated = False`"):
        await environment.reset()
    await environment.close()
    assert Matches[list[int]]().join(0, list).player == 0
