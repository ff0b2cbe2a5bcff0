"""How a step comes back from disk: torch.distributed.checkpoint's reader, which reads the metadata once, and tensors
through one piece of memory."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from hyper_parallel.components.checkpoint.verification import DamagedError, file_damage


class StepReader(FileSystemReader):
    """Reads the files of one folder."""

    @cached_property
    def metadata(self) -> Metadata:
        """Names and sizes of all entries, and where they lie.

        Raises:
            DamagedError: it is not what was written, and cannot be unpickled safely.
        """
        if reason := file_damage(Path(self.path), ".metadata"):
            raise DamagedError(reason)
        return super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        tensors: dict[str, list[ReadItem]] = defaultdict(list)
        others: list[ReadItem] = []
        for item in plan.items:
            of_file = tensors[self.storage_data[item.storage_index].relative_path]
            (of_file if item.type is LoadItemType.TENSOR else others).append(item)
        memory = torch.empty(0, dtype=torch.uint8)
        for name, items in tensors.items():
            with (Path(self.path) / name).open("rb") as file:
                for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                    memory = self._read_tensor(file, item, planner, memory)
        return super().read_data(dataclasses.replace(plan, items=others), planner)

    def _read_tensor(self, file: BinaryIO, item: ReadItem, planner: LoadPlanner, memory: torch.Tensor) -> torch.Tensor:
        """Reads `item` into `memory`, or into more where that is too small, and returns what it used. To find pages of
        fresh memory for every tensor would take longer than all else."""
        place = self.storage_data[item.storage_index]
        saved = torch.load(self._slice_file(file, place), map_location="meta", weights_only=True)
        storage = saved.untyped_storage()
        if memory.nbytes < storage.nbytes():
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8)
        file.seek(place.offset + storage._checkpoint_offset)
        if file.readinto(memory.numpy()[: storage.nbytes()]) != storage.nbytes():
            raise DamagedError(f"{place.relative_path} ends within {item.storage_index.fqn}")
        tensor = torch.empty(0, dtype=saved.dtype)
        tensor.set_(memory.untyped_storage(), saved.storage_offset(), saved.size(), saved.stride())
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        assert target.size() == tensor.size(), "the planner cuts what is saved to what is asked for"
        target.copy_(tensor)
        planner.commit_tensor(item, target)
        return memory
