"""Weights of a Hugging Face folder, read into and written from a model that may be sharded over ranks.

Every rank calls these functions, with the whole model; without a process group there is one rank.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.config.errors import RunError
from hyper_parallel.distributed.atomic_folder import make_partial, partial_name, publish
from hyper_parallel.distributed.fsdp import reshard
from hyper_parallel.distributed.process_group import rank
from hyper_parallel.distributed.safetensors_writer import DTYPE_NAMES, SafetensorsWriter, TensorSpec
from hyper_parallel.distributed.together import gathered, on_rank_0, together
from hyper_parallel.platform import get_platform
from hyper_parallel.protocols.local_block import LocalBlock, local_block
from hyper_parallel.protocols.module import canonical_name
from hyper_parallel.protocols.state_dict_adapter import HFBlock, StateDictAdapter

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAPPED_BYTES = 2**26
"""What is read of a file before it is opened anew: as long as it is open, its pages count as memory of the process."""


class HFWeightsError(RunError, ValueError):
    """Weights cannot be read, do not fit, or cannot be written. Says where, and names every tensor."""


# Reading


class _Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class _Parameter(NamedTuple):
    """A parameter of the whole model, of which this rank may have nothing: stages of a pipeline have their own."""

    like: torch.Tensor
    """Its whole shape and its type, on meta."""
    holder: int
    """The first rank that has it."""


class _Read(NamedTuple):
    """A block of a stored tensor, and where it goes."""

    stored: _Stored
    source: tuple[slice, ...]
    target: torch.Tensor


@torch.no_grad()
def load_hf_weights(model_parts: Sequence[nn.Module], adapter: StateDictAdapter, folder: str | Path) -> None:
    """Copies the folder's tensors into the parameters, in whatever type these have.

    A rank reads the blocks that it holds and no others. Beside its parameters it holds one block, or `MAPPED_BYTES` of
    smaller ones.

    Raises:
        HFWeightsError: on every rank. Tensors are missing, unexpected, misshapen or of no floating-point type: all are
            named, and nothing is copied. Or files are absent, damaged or cannot be read.
    """
    parameters = list(_parameters(model_parts))
    everyone = _of_all_ranks(parameters)
    reads = together(lambda: _plan(parameters, everyone, adapter, Path(folder)), HFWeightsError)
    together(lambda: _copy(reads), HFWeightsError)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`: those that its index names, or the single one.

    Raises:
        FileNotFoundError: there are none, or not all that the index names.
        HFWeightsError: the index is damaged.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # no JSON, or of another shape
            raise HFWeightsError(f"{index} is damaged ({type(error).__name__}: {error}); download it again") from error
        files = [folder / name for name in sorted(names)]
    else:
        files = [folder / SINGLE]
    absent = [str(file) for file in files if not file.is_file()]
    if absent:
        raise FileNotFoundError(f"no weights at {', '.join(absent)}")
    return files


def _plan(
    parameters: Sequence[tuple[str, torch.Tensor]],
    everyone: dict[str, _Parameter],
    adapter: StateDictAdapter,
    folder: Path,
) -> list[_Read]:
    stored = _stored_tensors(folder)

    def blocks_of(name: str, shape: Sequence[int]) -> Sequence[HFBlock]:
        layouts = adapter.hf_layouts(name, shape)
        return next((blocks for blocks in layouts if any(b.hf_name in stored for b in blocks)), layouts[0])

    # Of a tensor in several parts the last one ends where the tensor does.
    shapes = {
        hf_name: tuple(map(sum, zip(_starts(part, whole.like[block].dim()), whole.like[block].shape, strict=True)))
        for name, whole in everyone.items()
        for hf_name, block, part in blocks_of(name, whole.like.shape)
    }
    reads: list[_Read] = []
    for name, parameter in parameters:
        local = local_block(parameter)
        for hf_name, block, part in blocks_of(name, parameter.shape):
            overlap = _overlap(block, parameter.shape, local)
            if overlap is not None and hf_name in stored:
                source, target = overlap
                starts = _starts(part, len(source))
                source = tuple(slice(s.start + at, s.stop + at) for s, at in zip(source, starts, strict=True))
                reads.append(_Read(stored[hf_name], source, local.tensor[target]))
    _refuse_misfits(folder, stored, shapes, adapter.hf_copies())
    return reads


def _starts(part: tuple[slice, ...], dims: int) -> list[int]:
    """Where a part of a stored tensor begins, per dim."""
    return [dim.start or 0 for dim in part] + [0] * (dims - len(part))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            yield content
    except SafetensorError as error:
        raise HFWeightsError(f"{file} is damaged ({error}); write or download it again") from error


def _stored_tensors(folder: Path) -> dict[str, _Stored]:
    found: dict[str, _Stored] = {}
    for file in weight_files(folder):
        with _opened(file) as content:
            for name in content.keys():  # noqa: SIM118
                if name in found:
                    raise HFWeightsError(f"{name} is both in {found[name].file} and in {file}; remove one")
                header = content.get_slice(name)
                found[name] = _Stored(file, name, tuple(header.get_shape()), header.get_dtype())
    return found


def _refuse_misfits(
    folder: Path, stored: dict[str, _Stored], shapes: dict[str, tuple[int, ...]], copies: dict[str, str]
) -> None:
    problems = [f"missing: {name} {shape}" for name, shape in shapes.items() if name not in stored]
    problems += [
        f"unexpected: {name} {tensor.shape}"
        for name, tensor in stored.items()
        if name not in shapes and name not in copies
    ]
    for name, tensor in stored.items():
        if name in shapes and tensor.shape != shapes[name]:
            problems.append(f"misshapen: {name} is {tensor.shape}, the model has {shapes[name]}")
        if name in shapes and tensor.dtype not in DTYPE_NAMES.values():
            problems.append(f"of another type: {name} is {tensor.dtype}, not one of {', '.join(DTYPE_NAMES.values())}")
    for copy, original in copies.items():
        if copy in stored and original in stored and rank() == 0 and not _equal(stored[copy], stored[original]):
            problems.append(f"not tied: {copy} differs from {original}, and the model has one parameter for both")
    if problems:
        raise HFWeightsError(f"the weights in {folder} do not fit the model:\n" + "\n".join(problems))


def _equal(one: _Stored, other: _Stored) -> bool:
    """Whether two tensors hold the same, compared `MAPPED_BYTES` at a time."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False

    def load(tensor: _Stored, rows: slice) -> torch.Tensor:
        with _opened(tensor.file) as content:
            return content.get_slice(tensor.name)[rows]

    step = max(1, MAPPED_BYTES // 8 // torch.Size(one.shape[1:]).numel())
    chunks = (slice(start, start + step) for start in range(0, one.shape[0], step))
    return all(torch.equal(load(one, rows), load(other, rows)) for rows in chunks)


def _overlap(
    block: tuple[int | slice, ...], shape: Sequence[int], local: LocalBlock
) -> tuple[tuple[slice, ...], tuple[int | slice, ...]] | None:
    """Where the block of a parameter of `shape` and the part of it on this rank meet: what of the stored tensor goes
    to which elements of `local`. None: nowhere."""
    if local.tensor.numel() == 0:
        return None
    source: list[slice] = []
    target: list[int | slice] = []
    for dim, size in enumerate(shape):
        index = block[dim] if dim < len(block) else slice(None)
        start, stop = (index, index + 1) if isinstance(index, int) else index.indices(size)[:2]
        offset = local.offset[dim]
        first, last = max(start, offset), min(stop, offset + local.tensor.shape[dim])
        if first >= last:
            return None
        if isinstance(index, int):
            target.append(first - offset)
        else:
            source.append(slice(first - start, last - start))
            target.append(slice(first - offset, last - offset))
    return tuple(source), tuple(target)


def _copy(reads: Sequence[_Read]) -> None:
    for file, batch in _batches(reads):
        with _opened(file) as content:
            for stored, source, target in batch:
                target.copy_(content.get_slice(stored.name)[source])


def _batches(reads: Sequence[_Read]) -> Iterator[tuple[Path, list[_Read]]]:
    """`reads` file by file, about `MAPPED_BYTES` at a time."""
    batch: list[_Read] = []
    size_bytes = 0
    for read in sorted(reads, key=lambda read: read.stored.file):
        if batch and (read.stored.file != batch[0].stored.file or size_bytes > MAPPED_BYTES):
            yield batch[0].stored.file, batch
            batch, size_bytes = [], 0
        batch.append(read)
        size_bytes += read.target.nbytes
    if batch:
        yield batch[0].stored.file, batch


# Writing


@torch.no_grad()
def save_hf_weights(
    model_parts: Sequence[nn.Module],
    adapter: StateDictAdapter,
    folder: str | Path,
    *,
    max_shard_bytes: float = 5e9,
    replace: bool = False,
    add_files: Callable[[Path], None] | None = None,
) -> int:
    """Writes a model as `write_hf_folder` does. Parameters are gathered one by one, and rank 0 writes."""
    own = dict(_parameters(model_parts))
    everyone = _of_all_ranks(list(own.items()))
    return write_hf_folder(
        {name: parameter.like for name, parameter in everyone.items()},
        lambda name: _whole_on_rank_0(own.get(name), *everyone[name]),
        adapter,
        folder,
        max_shard_bytes=max_shard_bytes,
        replace=replace,
        add_files=add_files,
    )


@torch.no_grad()
def write_hf_folder(
    parameters: Mapping[str, torch.Tensor],
    whole: Callable[[str], torch.Tensor],
    adapter: StateDictAdapter,
    folder: str | Path,
    *,
    max_shard_bytes: float = 5e9,
    replace: bool = False,
    add_files: Callable[[Path], None] | None = None,
) -> int:
    """Writes a folder that transformers loads: safetensors, an index if they are several, config.json.

    The folder appears under its name when it is whole, so a process that is killed leaves no half one; a machine that
    loses its power may, for nothing here waits for the disk.

    Args:
        parameters: name in the plain model -> a tensor of its shape and type, on meta.
        whole: called on every rank for one name after the other; what it returns on rank 0 is written, before it is
            called again.
        max_shard_bytes: of the tensors in a file, one larger tensor excepted.
        replace: remove a folder of weights that stands there already, once the new one is whole.
        add_files: called on rank 0 with the unfinished folder, to write more into it.

    Returns:
        Bytes of all tensors.

    Raises:
        HFWeightsError: on every rank. `folder` holds files already, or cannot be written; what was written is removed.
    """
    folder = Path(folder).resolve()  # where a link leads to may be another disk
    files = _files(list(parameters.items()), adapter, max_shard_bytes)

    def start() -> SafetensorsWriter:
        if not (replace and any(folder.glob("*.safetensors"))):
            refuse_occupied(folder)
        return SafetensorsWriter(make_partial(folder), files)

    def write(name: str, tensor_of_model: torch.Tensor) -> None:
        for hf_name, tensor in adapter.to_hf(name, tensor_of_model):
            writer.write(hf_name, tensor)

    def finish() -> None:
        writer.close()
        unfinished = partial_name(folder)
        if len(files) > 1:
            weight_map = {name: file for file, specs in files.items() for name in specs}
            _write_json(unfinished / INDEX, {"metadata": {"total_size": size_bytes}, "weight_map": weight_map})
        dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
        _write_json(unfinished / "config.json", adapter.hf_config(dtype))
        if add_files is not None:
            add_files(unfinished)
        publish(folder)

    size_bytes = sum(spec.size_bytes for specs in files.values() for spec in specs.values())
    try:
        writer = on_rank_0(start, HFWeightsError)
        for name in parameters:
            tensor = whole(name)
            on_rank_0(partial(write, name, tensor), HFWeightsError)
            del tensor  # before the next one is gathered
        on_rank_0(finish, HFWeightsError)
    except HFWeightsError as error:
        if rank() == 0:
            shutil.rmtree(partial_name(folder), ignore_errors=True)  # its space may be what the disk lacks
        raise HFWeightsError(f"{folder} could not be written: {error}") from error
    return size_bytes


def refuse_occupied(folder: Path) -> None:
    """
    Raises:
        FileExistsError: `folder` holds files, so that weights would be lost or mixed.
    """
    weights = sorted(file.name for file in folder.glob("*.safetensors*"))
    if weights:
        raise FileExistsError(f"{folder} already holds weights ({', '.join(weights)}); save into another folder")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; save into another folder")


def _files(
    parameters: Sequence[tuple[str, torch.Tensor]], adapter: StateDictAdapter, max_shard_bytes: float
) -> dict[str, dict[str, TensorSpec]]:
    """File name -> tensor name -> spec, in the order of the parameters."""
    shards: list[dict[str, TensorSpec]] = [{}]
    shard_bytes = 0
    for name, parameter in parameters:
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        for hf_name, tensor in adapter.to_hf(name, whole):
            if shards[-1] and shard_bytes + tensor.nbytes > max_shard_bytes:
                shards.append({})
                shard_bytes = 0
            shards[-1][hf_name] = TensorSpec(tuple(tensor.shape), tensor.dtype)
            shard_bytes += tensor.nbytes
    count = len(shards)
    if count == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{count:05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _parameters(model_parts: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name in the plain model and parameter, sharded where it may be; of tied ones the first."""
    reshard(model_parts)
    for part in model_parts:
        for name, parameter in part.named_parameters():
            yield canonical_name(name), parameter


def _of_all_ranks(parameters: Sequence[tuple[str, torch.Tensor]]) -> dict[str, _Parameter]:
    found: dict[str, _Parameter] = {}
    kinds = {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in parameters}
    for holder, theirs in enumerate(gathered(kinds)):
        for name, (shape, dtype) in theirs.items():
            found.setdefault(name, _Parameter(torch.empty(shape, dtype=dtype, device="meta"), holder))
    return found


def _whole_on_rank_0(parameter: torch.Tensor | None, like: torch.Tensor, holder: int) -> torch.Tensor:
    """The whole of a parameter (None: this rank has none of it), gathered by those that have it and sent to rank 0.
    Elsewhere it is whatever there is."""
    whole = like if parameter is None else parameter
    if hasattr(whole, "full_tensor"):
        whole = whole.full_tensor()
    if holder > 0:
        if rank() == holder:
            dist.send(whole.contiguous(), 0)
        elif rank() == 0:
            whole = torch.empty_like(like, device=get_platform().device())
            dist.recv(whole, holder)
    return whole


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
