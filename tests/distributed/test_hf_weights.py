from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from hyper_parallel.distributed import hf_weights
from hyper_parallel.distributed.hf_weights import HFWeightsError, load_hf_weights, save_hf_weights
from hyper_parallel.models import qwen3, qwen3_moe
from hyper_parallel.models.common.decoder import Decoder
from hyper_parallel.models.common.state_dict_adapter import DecoderStateDictAdapter
from hyper_parallel.protocols.local_block import local_block
from tests.distributed_world import run_world
from tests.models.reference import MOE_SIZES, SIZES

UNEVEN = {k: v for k, v in MOE_SIZES.items() if k != "output_router_logits"} | {
    "num_experts": 6,
    "moe_intermediate_size": 5,
    "mlp_only_layers": (1,),
}
"""Nothing that is sharded over 4 ranks divides by 4: some hold less than others, some nothing."""

LAYOUTS: dict[str, tuple[Any, ...]] = {
    "rows": (Replicate(), Shard(0)),
    "rows of rows": (Shard(0), Shard(0)),
    "columns": (Replicate(), Shard(-1)),
    "blocks": (Shard(0), Shard(-1)),
    "fsdp over tp": (_StridedShard(0, split_factor=2), Shard(0)),
    "copies": (Replicate(), Replicate()),
}


def decoder(dtype: torch.dtype = torch.float32, *, family: Any = qwen3_moe, seed: int = 1, **changes: Any) -> Decoder:
    sizes = UNEVEN if family is qwen3_moe else SIZES
    model = family.create_model_spec(**{**sizes, **changes}).model.build().to(dtype)
    model.init_weights(seed)
    return model


def adapter_of(model: Decoder) -> DecoderStateDictAdapter:
    return DecoderStateDictAdapter(model.config)


def save(model: Decoder, folder: Path | str, **options: Any) -> int:
    return save_hf_weights([model], adapter_of(model), folder, **options)


def fits(placement: Any, shape: torch.Size) -> bool:
    if isinstance(placement, _StridedShard):  # torch has no uneven ones
        return shape[0] % 4 == 0
    return not isinstance(placement, Shard) or placement.dim < len(shape)


def shard(model: Decoder, mesh: Any, placements: tuple[Any, ...]) -> Decoder:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fitting = [p if fits(p, parameter.shape) else Replicate() for p in placements]
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, fitting)))
    return model


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters. A collective."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in model.named_parameters()
    }


def every_layout(source: str, out: str) -> dict[str, Any]:
    """On 4 ranks: what each layout holds once `source` is loaded into it, and how much of it this rank has read."""
    mesh = init_device_mesh("cpu", (2, 2))
    results: dict[str, Any] = {}
    for name, placements in LAYOUTS.items():
        model = shard(decoder(torch.float64, seed=2), mesh, placements)
        parameters = list(hf_weights._parameters([model]))
        reads = hf_weights._plan(parameters, hf_weights._of_all_ranks(parameters), adapter_of(model), Path(source))
        load_hf_weights([model], adapter_of(model), source)
        results[name] = {
            "weights": weights(model),
            "read": sum(read.target.numel() for read in reads),
            "held": sum(local_block(p).tensor.numel() for p in model.parameters()),
        }
        save(model, Path(out) / name, max_shard_bytes=20_000)
    return results


def test_shards_of_every_layout(tmp_path: Path) -> None:
    model = decoder()
    save(model, tmp_path / "source")
    save(model.double(), tmp_path / "one process", max_shard_bytes=20_000)
    files = {file.name: file.read_bytes() for file in (tmp_path / "one process").iterdir()}
    assert len(files) > 3
    expected = weights(model)
    by_rank = run_world(4, every_layout, str(tmp_path / "source"), str(tmp_path))
    for name in LAYOUTS:
        for results in by_rank:
            result = results[name]
            assert result["read"] == result["held"]
            for parameter, value in expected.items():
                assert torch.equal(result["weights"][parameter], value), (name, parameter)
        exported = {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        assert exported == files, name
    whole = sum(p.numel() for p in model.parameters())
    assert {name: sum(results[name]["held"] for results in by_rank) / whole for name in ("rows of rows", "copies")} == {
        "rows of rows": pytest.approx(1, abs=0.02),  # norms that are too short stay whole
        "copies": 4,
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_written_is_what_safetensors_reads(dtype: torch.dtype, tmp_path: Path) -> None:
    model = decoder(dtype)
    size_bytes = save(model, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    expected = dict(
        (name, tensor) for item in model.named_parameters() for name, tensor in adapter_of(model).to_hf(*item)
    )
    assert stored.keys() == expected.keys()
    assert size_bytes == sum(tensor.nbytes for tensor in stored.values())
    for name, tensor in expected.items():
        assert stored[name].dtype == dtype and torch.equal(stored[name], tensor), name
    with (tmp_path / "model" / "model.safetensors").open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        assert header_bytes % 8 == 0  # as the library has it, so that data is aligned
        assert json.loads(file.read(header_bytes))["__metadata__"] == {"format": "pt"}  # transformers wants it
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    assert content["dtype"] == str(dtype).removeprefix("torch.")


def test_stacked_experts_are_read_as_well_as_single_ones(tmp_path: Path) -> None:
    model = decoder()
    save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {name: tensor for name, tensor in load_file(file).items() if ".experts." not in name}
    experts = {name: p.detach() for name, p in model.named_parameters() if ".experts." in name}
    # In a file gate and up are the rows of one matrix.
    stacked = {f"model.{name}": p.flatten(1, 2) if "gate_up" in name else p for name, p in experts.items()}
    assert [name.split(".")[-1] for name in stacked][:2] == ["gate_up_proj", "down_proj"]
    save_file(stored | stacked, file)
    other = decoder(seed=2)
    load_hf_weights([other], adapter_of(other), tmp_path)
    for name, value in weights(model).items():
        assert torch.equal(other.get_parameter(name), value), name


# Refusals


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(source: str, changes: dict[str, Any]) -> dict[str, Any]:
    """On a rank: what loading says, and whether it has left the weights alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard(decoder(seed=2, **changes), mesh, (Shard(0),))
    before = {name: value.clone() for name, value in weights(model).items()}
    with pytest.raises(HFWeightsError) as error:
        load_hf_weights([model], adapter_of(model), source)
    untouched = all(torch.equal(value, before[name]) for name, value in weights(model).items())
    return {"message": str(error.value), "untouched": untouched}


def damaged_on_rank_1(source: str) -> str:
    model = decoder(seed=2)
    if dist.get_rank() == 1:
        source = f"{source}/of another node"
    with pytest.raises(HFWeightsError) as error:
        load_hf_weights([model], adapter_of(model), source)
    return str(error.value)


def every_refusal(source: str, spoiled: str) -> dict[str, Any]:
    return {
        "spoiled": refused(spoiled, {}),
        "other sizes": refused(source, {"num_hidden_layers": 2, "vocab_size": 63}),
        "rank 1": damaged_on_rank_1(source),
    }


def test_what_does_not_fit_is_named_on_every_rank_and_nothing_is_copied(tmp_path: Path) -> None:
    source, spoiled = tmp_path / "source", tmp_path / "spoiled"
    save(decoder(), source)
    save(decoder(), spoiled)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.shared_expert.weight"] = torch.zeros(2)
        tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(6, 31)
        tensors["lm_head.weight"] = torch.zeros(64, 32, dtype=torch.int8)

    rewrite(spoiled, spoil)
    for results in run_world(2, every_refusal, str(source), str(spoiled)):
        assert results["spoiled"]["untouched"] and results["other sizes"]["untouched"]
        assert results["spoiled"]["message"].splitlines() == [
            f"the weights in {spoiled} do not fit the model:",
            "missing: model.layers.2.mlp.experts.3.up_proj.weight (5, 32)",
            "missing: model.norm.weight (32,)",
            "unexpected: model.layers.0.mlp.shared_expert.weight (2,)",
            "of another type: lm_head.weight is I8, not one of F64, F32, F16, BF16",
            "misshapen: model.layers.0.mlp.gate.weight is (6, 31), the model has (6, 32) (on rank 0)",
        ]
        lines = results["other sizes"]["message"].removesuffix(" (on rank 0)").splitlines()
        assert "misshapen: model.embed_tokens.weight is (64, 32), the model has (63, 32)" in lines
        assert len([line for line in lines if line.startswith("unexpected: model.layers.2.")]) == 8 + 1 + 6 * 3
        assert results["rank 1"] == (
            f"FileNotFoundError: no weights at {source}/of another node/model.safetensors (on rank 1)"
        )


def test_tied_weights(tmp_path: Path) -> None:
    model = decoder(family=qwen3, tie_word_embeddings=True)
    save(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_hf_weights([model], adapter_of(model), tmp_path)
    rewrite(tmp_path, lambda t: t["lm_head.weight"][63, 31].add_(1))
    with pytest.raises(
        HFWeightsError, match=r"not tied: lm_head.weight differs from model.embed_tokens.weight, and the"
    ):
        load_hf_weights([model], adapter_of(model), tmp_path)


def part(folder: Path, index: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[index]


def cut(file: Path, size_bytes: int | None) -> None:
    file.write_bytes(file.read_bytes()[:size_bytes])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: cut(part(folder, 1), -1), r"/model-00002-of-0000\d.safetensors is damaged \(Error"),
        (lambda folder: cut(part(folder, 1), 0), r"/model-00002-of-0000\d.safetensors is damaged \(Error"),
        (lambda folder: part(folder, 1).unlink(), r"no weights at \S*/model-00002-of-0000\d.safetensors"),
        (lambda folder: cut(folder / hf_weights.INDEX, -9), r"index.json is damaged \(JSONDecodeError"),
        (lambda folder: (folder / hf_weights.INDEX).write_text("[]"), r"index.json is damaged \(TypeError"),
        (
            lambda folder: part(folder, 1).write_bytes(part(folder, 0).read_bytes()),
            r"model.\S* is both in \S*/model-00001-of-0000\d.safetensors and in \S*/model-00002-of-0000\d.safetensors",
        ),
    ],
)
def test_damaged_files_are_named(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    model = decoder(family=qwen3)
    save(model, tmp_path, max_shard_bytes=50_000)
    damage(tmp_path)
    with pytest.raises(HFWeightsError, match=message):
        load_hf_weights([model], adapter_of(model), tmp_path)


def test_a_flipped_byte_in_a_header_is_named_or_changes_nothing(tmp_path: Path) -> None:
    """What safetensors says of names, types, shapes and places; of the values themselves it has no digest."""
    model = decoder(family=qwen3)
    save(model, tmp_path)
    file, expected = tmp_path / "model.safetensors", weights(model)
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    messages = []
    for place in [*range(8), *range(8, end, 23)]:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        try:
            load_hf_weights([model], adapter_of(model), tmp_path)
        except HFWeightsError as error:
            messages.append(str(error))
        else:
            assert all(torch.equal(value, expected[name]) for name, value in weights(model).items()), place
    assert len(messages) > 100
    about = re.compile("|".join(map(re.escape, (f"{file} is damaged (", f"the weights in {tmp_path} do not fit the"))))
    assert [message for message in messages if not about.match(message)] == []


# Folders


def test_a_folder_is_replaced_only_if_it_holds_weights_and_may_be(tmp_path: Path) -> None:
    one, other = decoder(family=qwen3), decoder(family=qwen3, seed=2)
    save(one, tmp_path / "model")
    with pytest.raises(HFWeightsError, match=r"already holds weights \(model.safetensors\); save into another folder"):
        save(other, tmp_path / "model")
    (tmp_path / "model" / "notes").touch()
    save(other, tmp_path / "model", replace=True)
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(load_file(tmp_path / "model/model.safetensors")["model.norm.weight"], other.norm.weight)
    with pytest.raises(HFWeightsError, match="is not empty; save into another folder"):
        save(one, tmp_path, replace=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    save(one, tmp_path / "link")
    assert sorted(file.name for file in (tmp_path / "elsewhere").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["elsewhere", "link", "model"]


def disk_full(folder: str) -> dict[str, Any]:
    """On a rank: the disk fills up after 50,000 bytes; what is said, and what is left of a new and of an older one."""
    from hyper_parallel.distributed.safetensors_writer import SafetensorsWriter

    model = shard(decoder(seed=2), init_device_mesh("cpu", (dist.get_world_size(),)), (Shard(0),))
    write, written = SafetensorsWriter.write, 0

    def full(self: SafetensorsWriter, name: str, tensor: torch.Tensor) -> None:
        nonlocal written
        written += tensor.nbytes
        if written > 50_000:
            raise OSError(28, "No space left on device")
        write(self, name, tensor)

    SafetensorsWriter.write = full
    messages = []
    for name in ("new", "older"):
        written = 0
        with pytest.raises(HFWeightsError) as error:
            save(model, Path(folder) / name, replace=True)
        messages.append(str(error.value))
    return {"messages": messages, "written": written}


def test_a_full_disk_leaves_no_half_folder_and_the_older_one_as_it_was(tmp_path: Path) -> None:
    save(decoder(), tmp_path / "older")
    before = (tmp_path / "older" / "model.safetensors").read_bytes()
    results = run_world(2, disk_full, str(tmp_path))
    assert results[0]["written"] > 50_000 and results[1]["written"] == 0  # rank 0 alone writes
    for result in results:
        for name, message in zip(("new", "older"), result["messages"], strict=True):
            cause = "OSError: [Errno 28] No space left on device (on rank 0)"
            assert message == f"{tmp_path / name} could not be written: {cause}"
    assert [folder.name for folder in tmp_path.iterdir()] == ["older"]
    assert (tmp_path / "older" / "model.safetensors").read_bytes() == before


def test_a_killed_save_leaves_no_folder(tmp_path: Path) -> None:
    def killed(folder: Path) -> None:
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(decoder(family=qwen3), tmp_path / "model", add_files=killed)
    assert [folder.name for folder in tmp_path.iterdir()] == ["model.partial"]
    save(decoder(family=qwen3), tmp_path / "model")
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"]


# Memory

PEAK = """
import sys
import torch
from torch import nn
from hyper_parallel.distributed.hf_weights import load_hf_weights, save_hf_weights
from hyper_parallel.protocols.state_dict_adapter import HFBlock, StateDictAdapter

class Rows(StateDictAdapter):
    def hf_blocks(self, name, shape):
        return [HFBlock(f"{name}.{row}", (row,)) for row in range(shape[0])]
    def hf_config(self, dtype):
        return {}
    def hf_differences(self, folder):
        return []

def peak_mb():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.ones(8, 1024, 1024)) for i in range(16)})  # 32 MB each
load_hf_weights([nn.ParameterDict()], Rows(None), sys.argv[2])  # what libraries take the first time
before = peak_mb()
save_hf_weights([model], Rows(None), sys.argv[1])
saved = peak_mb()
with torch.no_grad():
    for parameter in model.values():
        parameter.zero_()
load_hf_weights([model], Rows(None), sys.argv[1])
assert all(bool((parameter == 1).all()) for parameter in model.values())
print(saved - before, peak_mb() - saved)
"""


def test_memory_beside_the_parameters_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """512 MB of parameters: saving takes no copy of more than one, loading a window of 64 MB and a tensor."""
    (tmp_path / "empty").mkdir()
    save_file({}, tmp_path / "empty" / "model.safetensors")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PEAK, str(tmp_path / "model"), str(tmp_path / "empty")]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    saving, loading = map(float, result.stdout.split())
    assert saving < 40, saving
    assert loading < 100, loading
