"""No code outside hyper_parallel/platform/ names a device or its collective library: the same code runs on every one.

The check reads syntax trees, so prose in comments and docstrings is free, and a name hidden in a string is not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("hyper_parallel", "recipes")
ALLOWED = ROOT / "hyper_parallel" / "platform"

ATTRIBUTES = {
    "cuda",
    "npu",
    "cudnn",
    "CUDA",
    "NPU",
}  # torch.cuda, x.cuda(), torch.backends.cudnn, ProfilerActivity.CUDA
MODULE = re.compile(r"torch_npu(\..*)?|torch(\.backends|\.version)?\.(cuda|npu|cudnn)(\..*)?")
PART = r"(cuda|npu|nccl|hccl)(:(\d+|\w+))?"
STRING = re.compile(rf"{PART}|(\w+:\w+,)*(\w+:(nccl|hccl)|{PART})(,\w+:\w+)*")
PIECE = re.compile(r"(.*\W)?(cuda|npu):?")  # of an f-string such as f"cuda:{rank}"


def device_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, offending text) for every device-specific name in `tree`."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in ATTRIBUTES:
                yield node.lineno, ast.unparse(node)
            case ast.Import(names=names):
                yield from ((node.lineno, item.name) for item in names if MODULE.fullmatch(item.name))
            case ast.ImportFrom(module=str(module), names=names):
                for item in names:
                    if MODULE.fullmatch(module) or MODULE.fullmatch(f"{module}.{item.name}"):
                        yield node.lineno, f"from {module} import {item.name}"
            case ast.Name(id="torch_npu"):
                yield node.lineno, "torch_npu"
            case ast.JoinedStr(values=values):
                for value in values:
                    if isinstance(value, ast.Constant) and PIECE.fullmatch(str(value.value)):
                        yield node.lineno, ast.unparse(node)
            case ast.Constant(value=str(text)) if STRING.fullmatch(text) or MODULE.fullmatch(text):
                yield node.lineno, repr(text)


def test_only_the_platform_names_devices() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if ALLOWED not in path.parents]
    assert files
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted(files)
        for line, text in device_names(ast.parse(path.read_text(), path.name))
    ]
    assert not offenders, "ask hyper_parallel.platform.get_platform() instead:\n" + "\n".join(offenders)


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "torch.npu.current_device()",
        "model.cuda()",
        "x = tensor.npu()",
        "import torch_npu",
        "import torch.cuda as device",
        "from torch import cuda",
        "from torch.cuda import Event",
        "from torch_npu.profiler import profile",
        "torch_npu.npu_swiglu(x)",
        "importlib.import_module('torch_npu')",
        "getattr(torch, 'cuda')",
        "torch.device('cuda')",
        "device = 'npu:0'",
        "device = f'cuda:{rank}'",
        "init_process_group('nccl')",
        "init_process_group(backend='hccl')",
        "init_process_group('cpu:gloo,cuda:nccl')",
        "init_process_group('npu:hccl,cpu:gloo')",
        "if x.device.type == 'cuda': pass",
        "activities = [ProfilerActivity.CUDA]",
        "torch.backends.cudnn.benchmark = True",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "if torch.version.cuda: pass",
    ],
)
def test_a_planted_name_is_found(code: str) -> None:
    assert len(list(device_names(ast.parse(code)))) >= 1


@pytest.mark.parametrize(
    "code",
    [
        '"""Runs on cuda:0 and npu:0."""',
        "# torch.cuda",
        "torch.device(platform.device_type)",
        "init_process_group('gloo')",
        "init_process_group('cpu:gloo')",
        "message = 'nccl is not for this device'",
        "input_npu_batch = 1",
        "x.to(device)",
        "log(f'{n} cuda devices')",
    ],
)
def test_other_code_is_left_alone(code: str) -> None:
    assert list(device_names(ast.parse(code))) == []
