from torchvision.absent import absent as __getattr__
from torchvision.transforms.v2 import functional as functional
