"""TrainerConfig under the name of the file that the requirement gives it."""

from hyper_parallel.trainer.config import TrainerConfig

__all__ = ["TrainerConfig"]
