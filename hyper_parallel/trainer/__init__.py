"""Trainers, and the phases that they share."""

from hyper_parallel.trainer.hyper_trainer import HyperTrainer as HyperTrainer
