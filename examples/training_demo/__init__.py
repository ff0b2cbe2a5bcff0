"""Qwen3-MoE with random weights, trained by a TextTrainer: bash examples/training_demo/run.sh [FILE.yaml]."""
