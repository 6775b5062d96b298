from torchvision.absent import absent as __getattr__
