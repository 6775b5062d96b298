"""Signatures of the Python objects that ranks exchange in collectives.

torch pickles these objects, and gloo accepts connections from anyone who reaches its port, so an attacker who poses as a rank could run
code on the others. Objects are therefore signed with a key that only the ranks have, and an object without a valid signature is refused
before it is unpickled.
"""

import hmac
import io
import pickle
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from fuligo.errors import TrainerError

_SIGNATURE_BYTES = 32


class ForgedObjectError(RuntimeError):
    """Raised for an object in a collective that no rank of this trainer has signed."""


def sign_objects(key: bytes | None) -> None:
    """Sign and verify the objects of all collectives of this process (`gather_object`, `broadcast_object_list`, ...).

    This includes the collectives of torch's distributed checkpoints and of Megatron-Core.

    Args:
        key: secret of the ranks; None: stop signing, so that objects are plain pickles again.

    Raises:
        TrainerError: this version of torch does not pickle objects with the functions that are replaced here.
    """
    if not hasattr(c10d, "_pickler") or not hasattr(c10d, "_unpickler"):
        if key is None:
            return
        raise TrainerError(
            f"cannot sign the objects of collectives: torch {torch.__version__} pickles them elsewhere; install torch 2.11 to 2.13"
        )
    if key is None:
        c10d._pickler, c10d._unpickler = pickle.Pickler, pickle.Unpickler
        return

    class SignedPickler:
        """Replacement for `pickle.Pickler` that signs objects."""

        def __init__(self, stream: io.BytesIO) -> None:
            self._stream = stream

        def dump(self, value: Any) -> None:
            body = pickle.dumps(value)
            self._stream.write(_signature(key, body) + body)

    class SignedUnpickler:
        """Replacement for `pickle.Unpickler` that verifies signatures."""

        def __init__(self, stream: io.BytesIO) -> None:
            self._stream = stream

        def load(self) -> Any:
            signature, body = self._stream.read(_SIGNATURE_BYTES), self._stream.read()
            if not hmac.compare_digest(signature, _signature(key, body)):
                raise ForgedObjectError("refused an object of a collective: it is not signed by a rank of this trainer")
            return pickle.loads(body)

    c10d._pickler, c10d._unpickler = SignedPickler, SignedUnpickler  # pyrefly: ignore[bad-assignment]


def _signature(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, b"fuligo objects " + body, "sha256")
