"""Command-line tools for data: python -m hyper_parallel.data_tools TOOL --help."""
