"""Python config functions: each returns a TrainerConfig. One file a family; the hardware stands in the name."""
