from enum import StrEnum, auto

from torchvision.absent import absent as __getattr__  # noqa: F401
from torchvision.transforms import functional as functional
from torchvision.transforms import v2 as v2


class InterpolationMode(StrEnum):
    NEAREST = auto()
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = auto()
    BICUBIC = auto()
    BOX = auto()
    HAMMING = auto()
    LANCZOS = auto()
