"""What plan_overrides may put in the place of modules of transformers' Qwen3-MoE."""
