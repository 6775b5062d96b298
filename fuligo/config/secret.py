"""Values that a run uses and never writes: keys, passwords, URLs that hold one, and environment variables of unknown meaning.

Files and messages show `${NAME}` instead. When a config is read, `${NAME}` is the value of the environment variable NAME.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self, TypeVar, overload

from pydantic import BeforeValidator, GetCoreSchemaHandler, SerializationInfo, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from fuligo.errors import ConfigError

T = TypeVar("T")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET_OPTION = re.compile(r"(^|_)(api_keys?|password|passwd|secret|db_url|redis_url|wandb_key|(hf|auth|access)_token)(_\d+)?$")
_SECRET_VARIABLE = re.compile(r"(^|_)(API_?KEYS?|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/\s?#\x22]*@")
_KEY_IN_URL = re.compile(r"(?<=[?&])((?:[a-z]+_)?(?:api_?key|key|token|secret|password|sig|signature)=)[^&#\s\x22]+", re.IGNORECASE)
_SETTINGS = re.compile(
    r"(CUBLAS_|CUBLASLT_|CUDA_|CUDNN_|DG_|FI_|FLASHINFER_|FULIGO_|GLOO_|GOMP_|HF_HOME$|HF_HUB_OFFLINE$|HOME$|INDEXER_ROPE_|KMP_|LC_|"
    r"LD_LIBRARY_PATH$|LD_PRELOAD$|MALLOC_|MASTER_|MC_|MKL_|MOONCAKE_|NCCL_|NUMEXPR_|NVIDIA_|NVSHMEM_|NVTE_|OMP_|OMPI_|OPENBLAS_|"
    r"PATH$|PYTHON|PYTORCH_|RAY_|SGLANG_|SGL_|SOCKET_IFNAME$|TOKENIZERS_|TORCH_|TORCHINDUCTOR_|"
    r"TMPDIR$|TP_SOCKET_|TRANSFORMERS_|TRITON_|UCX_|VLLM_|WANDB_(MODE|DIR|PROJECT|ENTITY)$|XLA_|no_proxy$|NO_PROXY$)"
)
"""Names of environment variables that tune libraries. Their values are recorded with a run, since none of them holds a key."""


class Secret:
    """Secret text, shown as `${variable}`; only `value` and `reveal` return it. Not a dataclass, which pydantic would serialize."""

    __slots__ = ("value", "variable")

    def __init__(self, variable: str, value: str | None) -> None:
        self.variable = variable
        """Environment variable that the value came from, or in which another run finds it."""
        self.value = value
        """Text of the secret; None if the variable is not set."""

    def reveal(self) -> str:
        """Return the text. Raises ConfigError if it refers to an environment variable that is not set."""
        if self.value is None:
            raise ConfigError(f"cannot read {self}: the environment variable {self.variable} is not set; export it")
        return self.value

    def __str__(self) -> str:
        return f"${{{self.variable}}}"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and (other.variable, other.value) == (self.variable, self.value)

    def __hash__(self) -> int:
        return hash((self.variable, self.value))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        shown = core_schema.plain_serializer_function_ser_schema(str, when_used="json")
        return core_schema.is_instance_schema(cls, serialization=shown)


def protect(text: str, variable: str, *, always: bool = False) -> str | Secret:
    """Return a `Secret` for a reference such as `${WANDB_API_KEY}`, for a URL with a password, and if `always`; else the text itself.

    A value that is given as text is shown as a reference to `variable`.
    """
    if (reference := _REFERENCE.fullmatch(text)) is not None:
        return Secret(reference[1], os.environ.get(reference[1]))
    return Secret(variable, text) if always or hide_credentials(text) != text else text


def reveal(value: T | Secret) -> T | str:
    """Return the text of a secret, and any other value as it is."""
    return value.reveal() if isinstance(value, Secret) else value


def hide_credentials(text: str) -> str:
    """Replace users, passwords and keys in the URLs of a text by `***`."""
    if "://" not in text:
        return text
    return _KEY_IN_URL.sub(r"\1***", _USER_IN_URL.sub("***@", text))


def is_secret_option(name: str) -> bool:
    """Return whether a flag of this name takes a secret, even if fuligo has no such flag: `sglang_api_key`, `wandb_key`, `env`."""
    return name in ("env", "engine_env") or _SECRET_OPTION.search(name) is not None


def _protected_url(given: Any, info: ValidationInfo) -> Any:
    return protect(given, (info.field_name or "url").upper()) if isinstance(given, str) else given


Url = Annotated[str | Secret, BeforeValidator(_protected_url)]
"""URL, which is a secret if it holds a password or a key."""


class Environment:
    """Immutable environment variables of child processes.

    Values are shown where the variable is known to tune a library (`NCCL_DEBUG`); all others are secret.
    """

    __slots__ = ("_values",)

    def __init__(self, given: Mapping[str, str | Secret] | None = None) -> None:
        self._values = {
            name: value if isinstance(value, Secret) else protect(value, name, always=not _is_setting(name))
            for name, value in (given or {}).items()
        }

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str) -> str: ...
    def get(self, name: str, default: str | None = None) -> str | None:
        """Return a value; the default if it is not given, or if it refers to a variable that is not set."""
        value = self._values.get(name)
        known = value.value if isinstance(value, Secret) else value
        return default if known is None else known

    def reveal(self) -> dict[str, str]:
        """Return all values, for the environment of a process. Raises ConfigError if one refers to a variable that is not set."""
        return {name: reveal(value) for name, value in self._values.items()}

    def secrets(self) -> Environment:
        """Return the variables whose values are secret."""
        return Environment({name: value for name, value in self._values.items() if isinstance(value, Secret)})

    def settings(self) -> dict[str, str]:
        """Return the variables whose values may be shown."""
        return {name: value for name, value in self._values.items() if isinstance(value, str)}

    def merged(self, other: Environment | Mapping[str, str]) -> Environment:
        """Return these variables, overridden by those of `other`."""
        return Environment({**self._values, **(other._values if isinstance(other, Environment) else other)})

    def shown(self) -> dict[str, str]:
        """Return names and values as they may be written, with placeholders for secrets."""
        return {name: str(value) for name, value in self._values.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping | Environment) and Environment().merged(other)._values == self._values

    __hash__ = None

    def __repr__(self) -> str:
        return f"Environment({self.shown()!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validated, serialization=core_schema.plain_serializer_function_ser_schema(cls._plain, info_arg=True)
        )

    def _plain(self, info: SerializationInfo) -> dict[str, Any]:
        return self.shown() if info.mode == "json" else dict(self._values)

    @classmethod
    def _validated(cls, given: object) -> Self:
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise PydanticCustomError("argument", "{text}", {"text": "must be an object of names and texts, or the name of one variable"})
        values: dict[str, str | Secret] = {}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, str | int | float | Secret):
                text = f"the value of {name!r} must be text; ${{{name}}} takes it from the environment of this command"
                raise PydanticCustomError("argument", "{text}", {"text": text})
            # Numbers become text, because YAML reads `NVSHMEM_DISABLE_NCCL: 1` as a number.
            values[str(name)] = value if isinstance(value, Secret) else str(value)
        return cls(values)


def _is_setting(name: str) -> bool:
    return _SETTINGS.match(name) is not None and _SECRET_VARIABLE.search(name) is None
