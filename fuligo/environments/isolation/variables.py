"""Environment variables for the processes of environments."""

import re
from collections.abc import Mapping

_SECRET = re.compile("SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|APIKEY|(^|_)(KEYS?|TOKENS?)(_|$)", re.IGNORECASE)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Limit of math libraries to one thread: a fork does not copy the threads that they start at import, and thousands of processes share
the cores anyway."""


def variables(handed_over: tuple[str, ...], environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables for processes of environments, and the names of the variables withheld from them.

    A variable is withheld if its name suggests a secret and is not in `handed_over`. GPUs are hidden, and math libraries use one thread
    unless `environment` says otherwise.
    """
    withheld = tuple(name for name in environment if _SECRET.search(name) and name not in handed_over)
    kept = {name: value for name, value in environment.items() if name not in withheld}
    return _ONE_THREAD | kept | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}, withheld
