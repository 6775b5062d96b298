"""Environment variables for the processes of environments."""

import re
from collections.abc import Mapping

_SECRET = re.compile("SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|APIKEY|(^|_)(KEYS?|TOKENS?)(_|$)", re.IGNORECASE)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Libraries start threads when they are imported, and a fork does not copy those; thousands of processes need no more than one each."""


def variables(handed_over: tuple[str, ...], environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment variables for environments, and the names of those withheld, whose names say that they hold a secret."""
    withheld = tuple(name for name in environment if _SECRET.search(name) and name not in handed_over)
    kept = {name: value for name, value in environment.items() if name not in withheld}
    return _ONE_THREAD | kept | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}, withheld
