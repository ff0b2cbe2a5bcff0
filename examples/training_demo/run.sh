#!/usr/bin/env bash
# Writes the model that a file trains, then trains it on as many ranks as the file shards it over.
#   bash examples/training_demo/run.sh [examples/training_demo/train_cpu.yaml [--training.max_steps=10 ...]]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
config="${1:-examples/training_demo/train.yaml}"
[ $# -eq 0 ] || shift
ranks="$(sed -n 's/^ *dp_shard_size: *\([0-9]*\).*/\1/p' "$config")"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python -m examples.training_demo.prepare_model "$config"
python -m torch.distributed.run --standalone --nproc_per_node="$ranks" --module \
  examples.training_demo.train_text "$config" "$@"
