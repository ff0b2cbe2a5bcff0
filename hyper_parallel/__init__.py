"""hyper_parallel trains large language models on Ascend NPU, CUDA and CPU, from one process to thousands of ranks."""

__version__ = "0.1.0"
