"""The slots of a training run: each file or folder is one of them, with its Config."""
