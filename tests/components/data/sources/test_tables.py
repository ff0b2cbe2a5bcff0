"""Parquet, Arrow and CSV: the same table in each, read from any row on."""

from __future__ import annotations

import itertools

import pyarrow
import pytest
from pyarrow import csv, parquet

from hyper_parallel.components.data.sources import choose_source
from hyper_parallel.config.errors import ConfigError

ROWS = [{"id": i, "text": f'line {i}\n"quoted", Ä'} for i in range(2500)]
TABLE = pyarrow.Table.from_pylist(ROWS)


def write_arrow(new_writer, path) -> None:
    with pyarrow.OSFile(str(path), "wb") as file, new_writer(file, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=700)


WRITERS = {
    "data.parquet": lambda path: parquet.write_table(TABLE, path, row_group_size=700),
    "file.arrow": lambda path: write_arrow(pyarrow.ipc.new_file, path),
    "stream.arrow": lambda path: write_arrow(pyarrow.ipc.new_stream, path),
    "data.csv": lambda path: csv.write_csv(TABLE, path),
}


@pytest.fixture(params=WRITERS)
def path(request, tmp_path):
    WRITERS[request.param](tmp_path / request.param)
    return tmp_path / request.param


def test_every_row_with_its_place(path):
    records = list(choose_source(str(path)).build())
    assert [record["text"] for record in records] == [row["text"] for row in ROWS]
    assert [int(record["id"]) for record in records] == list(range(2500))
    assert records[1041].where == f"{path} row 1042"


@pytest.mark.parametrize("taken", [0, 1, 699, 700, 701, 1024, 2499, 2500])
def test_a_position_is_followed_by_the_rows_behind_it(path, taken):
    source = choose_source(str(path)).build()
    list(itertools.islice(source, taken))
    again = choose_source(str(path)).build()
    again.load_state_dict(source.state_dict())
    assert [int(record["id"]) for record in again] == list(range(taken, 2500))


@pytest.mark.parametrize("name", ["data.parquet", "data.arrow"])
def test_a_file_of_another_format_is_refused(tmp_path, name):
    (tmp_path / name).write_text("text\nhello\n")
    with pytest.raises(
        ConfigError, match=rf"^dataloader\.path: {tmp_path / name} cannot be read \(.+; give a readable"
    ):
        list(choose_source(str(tmp_path / name)).build())


def test_csv_that_is_not_a_table_is_refused(tmp_path):
    for content, reason in ((b"a,b\n1,2\n3\n", "Expected 2 columns, got 1"), (b"a\n\xff\n", "invalid UTF8")):
        (tmp_path / "data.csv").write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            list(choose_source(str(tmp_path / "data.csv")).build())


def test_values_of_csv_are_text_whatever_they_look_like(tmp_path):
    (tmp_path / "data.csv").write_text("text,n\n12,\n007,NA\n")
    assert list(choose_source(str(tmp_path / "data.csv")).build()) == [
        {"text": "12", "n": ""},
        {"text": "007", "n": "NA"},
    ]
