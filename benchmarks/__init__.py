"""Measures what the README promises: `python -m benchmarks [NAME ...]`. Each file here that is a benchmark says what it
measures, and what it must come out at."""
