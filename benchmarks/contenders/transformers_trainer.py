"""transformers' Trainer on its own Qwen3-MoE, with nothing switched on that costs time and nothing of its own off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.training import SEED, Training
from benchmarks.turns import Turn


class TurnTaker(TrainerCallback):
    """Ends a step of the turn."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._turn.step_done()


def run(training: Training, turn: Turn, *, positions: bool = False) -> None:
    """Trains on rows that lie ready in memory.

    `positions`: hand out position ids that restart with each document, as DataCollatorWithFlattening does; the model
    then masks all but a token's own document. Otherwise a token attends to all of the row before it.
    """
    names = ["input_ids", "position_ids"] if positions else ["input_ids"]
    rows = [
        # The model shifts labels itself.
        {"labels": batch["input_ids"][row], **{name: batch[name][row] for name in names}}
        for batch in torch.load(training.batches)
        for row in range(training.rows)
    ]
    # The load-balancing loss belongs to the objective of ours; here it is off by default.
    model = AutoModelForCausalLM.from_pretrained(
        training.weights, dtype=getattr(torch, training.dtype), output_router_logits=True
    )
    arguments = TrainingArguments(
        output_dir=str(Path(training.folder) / "transformers"),
        max_steps=turn.steps,
        per_device_train_batch_size=training.rows,
        gradient_accumulation_steps=1,
        learning_rate=training.lr,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        optim="adamw_torch_fused",
        lr_scheduler_type="cosine",
        warmup_steps=training.warmup_steps,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,  # there is nothing to copy to
        use_cpu=True,
        seed=SEED,
    )
    print(model.config._experts_implementation, model.config._attn_implementation, arguments, flush=True)
    Trainer(model, arguments, train_dataset=rows, callbacks=[TurnTaker(turn)]).train()
