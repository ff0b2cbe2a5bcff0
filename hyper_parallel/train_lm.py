"""The front door under the name that scripts of language models know.

python -m hyper_parallel.train_lm --config-file run.yaml --training.max_steps 200 --parallelism.dp_shard 2
"""

from hyper_parallel.train import run

if __name__ == "__main__":
    run("hyper_parallel.train_lm")
