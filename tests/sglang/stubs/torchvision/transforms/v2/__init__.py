from torchvision.absent import absent as __getattr__  # noqa: F401
from torchvision.transforms.v2 import functional as functional
