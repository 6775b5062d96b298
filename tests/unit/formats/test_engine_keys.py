"""Keys open what they are for and are not shown."""

import pytest

from fuligo.formats.engine_keys import NO_KEYS, EngineKeys

KEYS = EngineKeys("sample", "control")


@pytest.mark.parametrize(
    ("method", "path", "key"),
    [
        ("POST", "/generate", "sample"),
        ("GET", "/server_info", "sample"),
        ("POST", "/update_weights_from_disk", "control"),
        ("POST", "/v1/loads", "control"),
        ("PUT", "/anything", "control"),
    ],
)
def test_each_call_needs_its_own_key(method: str, path: str, key: str) -> None:
    assert KEYS.headers(method, path) == {"Authorization": f"Bearer {key}"}
    other = {"sample": "control", "control": "sample"}[key]
    for given in ("", "Bearer", "Bearer ", key, f"bearer {key}", f"Bearer {other}", f"Bearer {key} ", f"Bearer {key}é"):
        assert not KEYS.admits(method, path, given)
    assert KEYS.admits(method, path, f"Bearer {key}")


def test_without_keys_nothing_but_health_is_open() -> None:
    assert NO_KEYS.headers("POST", "/generate") == {}
    assert not any(NO_KEYS.admits("POST", "/generate", given) for given in ("", "Bearer", "Bearer "))
    assert NO_KEYS.admits("GET", "/health", "")


def test_the_environment_passes_keys_on_once() -> None:
    environment = {**KEYS.environment, "PATH": "/bin"}
    assert EngineKeys.taken_from_environment(environment) == KEYS
    assert environment == {"PATH": "/bin"}
    assert EngineKeys.of_environment({"FULIGO_ENGINE_KEY": "both"}) == EngineKeys("both", "both")
    assert EngineKeys.of_environment({}) == NO_KEYS


def test_keys_are_random_and_not_shown() -> None:
    keys = EngineKeys.new()
    assert len({keys.requests, keys.control, EngineKeys.new().requests}) == 3
    assert keys.requests not in repr(keys)
    assert keys.control not in repr(keys)
