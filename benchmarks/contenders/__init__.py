"""Those who train: each module has `run(training, turn)`."""
