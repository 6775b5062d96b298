"""Stands in for torchvision where torch is a CPU build, beside which the registry's torchvision does not load.

SGLang imports it for image models only; text models use none of it.
"""

from torchvision import io as io
from torchvision import transforms as transforms

__version__ = "0.28.0"
