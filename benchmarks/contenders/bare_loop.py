"""A loop written by hand over our own model and loss: the same arithmetic with no framework around it."""

from __future__ import annotations

import math

import torch

from benchmarks.training import Training, make_batches
from benchmarks.turns import Turn
from hyper_parallel.components.loss import AutoCELoss
from hyper_parallel.models import load_hf


def run(training: Training, turn: Turn) -> None:
    """Trains on batches that lie ready in memory before the first step."""
    batches = make_batches(training, turn.steps)
    model = load_hf(training.weights, dtype=getattr(torch, training.dtype)).train()
    loss_fn = AutoCELoss.Config().build(vocab_size=model.vocab_size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.lr, betas=training.betas, weight_decay=training.weight_decay, fused=True
    )

    def share_of_lr(step: int) -> float:
        if step < training.warmup_steps:
            return step / training.warmup_steps
        progress = (step - training.warmup_steps) / max(1, turn.steps - training.warmup_steps)
        return (1 + math.cos(math.pi * progress)) / 2

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)
    for batch in batches:
        output = model(
            batch["input_ids"],
            position_ids_BT=batch["position_ids"],
            cu_seqlens=batch["cu_seqlens"],
            labels_BT=batch["labels"],
            loss_fn=loss_fn,
        )
        loss = output.loss_sum / (batch["labels"] != -100).sum() + output.aux_loss_sum / training.rows
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        turn.step_done()
