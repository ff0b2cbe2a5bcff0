"""The whole of a training script: torchrun --nproc_per_node=8 -m examples.training_demo.train_text FILE.yaml."""

from hyper_parallel.config.manager import parse_training_args
from hyper_parallel.trainer import TextTrainer

if __name__ == "__main__":
    TextTrainer(parse_training_args()).train()
