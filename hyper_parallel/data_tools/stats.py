"""Counts what a configuration trains on: documents, tokens, their lengths, and how well rows are filled."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from hyper_parallel.config import manager, resolver
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.config.imports import import_object

if TYPE_CHECKING:
    from hyper_parallel.components.data.documents import TokenizedDocuments
    from hyper_parallel.components.data.packing import Packing

_BINS = 50
_NAME_WIDTH = 40
_COUNTED_AT_A_TIME = 1 << 24
_HEADINGS = (
    "documents",
    "tokens",
    "trained",
    "shortest",
    "median",
    "mean",
    "95 %",
    "longest",
    "rows",
    "filled",
    "of rows",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's command line."""
    parser.add_argument(
        "--png", metavar="FILE", help="histogram of the lengths of documents (default: lengths.png, with matplotlib)"
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file, or recipe as in recipes.qwen3_moe.debug")
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="...", help="settings, as in --dataloader.path my_text.jsonl"
    )


def run(arguments: argparse.Namespace) -> None:
    """Reads all that the dataloader reads, prints a table of it and draws the lengths.

    Raises:
        ConfigError: the configuration or the data is wrong, or a drawing is asked for and matplotlib is not there.
    """
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if arguments.png is not None and not can_draw:
        raise ConfigError.one(
            "--png", "matplotlib is not installed", "pip install 'hyper_parallel[plot]', or leave it out"
        )
    door = [arguments.config] if arguments.config.endswith((".yaml", ".yml")) else ["--recipe", arguments.config]
    root = import_object(resolver.ROOT, "root")
    tree = manager.load(root, [*door, *arguments.flags], world_size=1, prog="hyper_parallel.data_tools stats")
    counts, lengths = _count(tree)
    for line in table(counts):
        print(line)
    if can_draw:
        draw(lengths, tree.training.seq_len, arguments.png or "lengths.png")
        print(f"lengths of documents: {arguments.png or 'lengths.png'}")
    else:
        print("no histogram: matplotlib is not installed; pip install 'hyper_parallel[plot]'")


class Counts(NamedTuple):
    """One line of the table."""

    name: str
    documents: int
    tokens: int
    trained: int
    """Tokens that are predicted: not the first of a document, nor what a transform leaves out."""
    lengths: tuple[int, float, float, float, int]
    """Shortest, median, mean, 95th percentile, longest; in tokens."""
    rows: int
    """Rows of one epoch that are of this source."""
    filled: float
    """Part of the positions of its rows that is no padding."""
    share: float
    """Part of an epoch's rows."""
    notes: dict[str, int]
    """What was done to documents, or why they were left out -> how many."""


def count_source(name: str, documents: TokenizedDocuments, packing: Packing, seq_len: int) -> Counts:
    """The counts of one source by itself."""
    lengths = documents.lengths
    quantiles = np.quantile(lengths, [0.5, 0.95]) if len(lengths) else (0.0, 0.0)
    rows = packing.rows_per_epoch
    return Counts(
        name,
        len(lengths),
        len(documents.token_ids),
        _trained(documents),
        (
            int(lengths.min(initial=lengths[0] if len(lengths) else 0)),
            float(quantiles[0]),
            float(lengths.mean()) if len(lengths) else 0.0,
            float(quantiles[1]),
            int(lengths.max(initial=0)),
        ),
        rows,
        packing.tokens_per_epoch / (rows * seq_len) if rows else 0.0,
        1.0,
        documents.counts,
    )


def table(counts: list[Counts]) -> Iterator[str]:
    """The lines to print."""
    counts = [each._replace(name=each.name[-_NAME_WIDTH:]) for each in counts]
    width = max(len(each.name) for each in counts)
    yield f"{'':{width}}" + "".join(f"{heading:>13}" for heading in _HEADINGS)
    for each in counts:
        shortest, median, mean, high, longest = each.lengths
        cells = [f"{number:,}" for number in (each.documents, each.tokens, each.trained, shortest)]
        cells += [f"{median:,.0f}", f"{mean:,.1f}", f"{high:,.0f}", f"{longest:,}", f"{each.rows:,}"]
        cells += [f"{each.filled:.2%}", f"{each.share:.2%}"]
        yield f"{each.name:{width}}" + "".join(f"{cell:>13}" for cell in cells)
    for each in counts:
        for note, count in each.notes.items():
            yield f"{each.name}: {count:,} {note}"


def draw(lengths: dict[str, Any], seq_len: int, path: str) -> None:
    """Writes a histogram of the lengths of each source's documents, both axes logarithmic, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    longest = max((int(each.max(initial=1)) for each in lengths.values()), default=1)
    bins = np.unique(np.geomspace(1, longest + 1, _BINS).round())
    for name, each in lengths.items():
        axes.hist(each, bins=bins, histtype="step", label=name)
    axes.axvline(seq_len, linestyle=":", color="black", label=f"training.seq_len {seq_len:,}")
    axes.set(xscale="log", yscale="log", xlabel="tokens in a document", ylabel="documents")
    axes.legend()
    figure.savefig(path, format="png", dpi=120)


def _count(tree: Any) -> tuple[list[Counts], dict[str, Any]]:
    from hyper_parallel.components.data import TextDataLoader
    from hyper_parallel.components.data.mixture import Mixture
    from hyper_parallel.components.data.rows import packed_rows, read_sources

    config, training = tree.dataloader, tree.training
    if not isinstance(config, TextDataLoader.Config):
        fact = f"the dataloader is a {type(config).__qualname__}"
        raise ConfigError(
            [Fault("dataloader", fact, "give a TextDataLoader.Config: others keep their data to themselves")]
        )
    tokenizer = tree.tokenizer.build(hf_assets_path=tree.hf_assets_path)

    def watch(records: Iterator[Any], name: str) -> Iterator[Any]:
        return iter(tqdm(records, desc=name, unit=" documents", unit_scale=True, disable=None))

    sources = list(read_sources(config, tokenizer, training.seq_len, training.seed, watch))
    data = [documents for _, documents in sources]
    rows, packings = packed_rows(config, data, tokenizer, training.seq_len, training.seed)
    counts = [
        count_source(name, documents, packing, training.seq_len)
        for (name, documents), packing in zip(sources, packings, strict=True)
    ]
    if isinstance(rows, Mixture):
        counts = [
            each._replace(rows=int(own), share=own / rows.rows_per_epoch)
            for each, own in zip(counts, rows.rows_of_each, strict=True)
        ]
    return counts, {name: documents.lengths for name, documents in sources}


def _trained(documents: TokenizedDocuments) -> int:
    """Tokens that have one before them in their document and are to be predicted."""
    if documents.trained is None:
        return int(np.maximum(documents.lengths - 1, 0).sum())
    trained = sum(
        int(np.count_nonzero(documents.trained[start : start + _COUNTED_AT_A_TIME]))
        for start in range(0, len(documents.trained), _COUNTED_AT_A_TIME)
    )
    return trained - int(np.count_nonzero(documents.trained[documents.offsets[:-1][documents.lengths > 0]]))
