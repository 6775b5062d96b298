from torchvision.absent import absent as __getattr__  # noqa: F401


class ImageReadMode:
    RGB = 0
