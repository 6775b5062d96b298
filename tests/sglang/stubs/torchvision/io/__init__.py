from torchvision.absent import absent as __getattr__


class ImageReadMode:
    RGB = 0
