from __future__ import annotations

import gzip
import itertools
import json

import pyarrow
import pytest

from hyper_parallel.components.data.reading import read_documents
from hyper_parallel.components.data.sources import choose_source
from hyper_parallel.components.data.transforms import PlainTextTransform
from hyper_parallel.config.errors import ConfigError
from tests.components.data.numbers import NumberTokenizer


def read_texts(path, text_field):
    transform = PlainTextTransform.Config(field=text_field).build(tokenizer=NumberTokenizer(), seq_len=8)
    return map(transform.read, choose_source(str(path)).build())


COMPRESSIONS = {".jsonl": None, ".gz": "gzip", ".zst": "zstd"}


def message_of(path, text_field="text") -> str:
    with pytest.raises(ConfigError) as caught:
        list(read_texts(path, text_field))
    return str(caught.value)


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbfChapter 1\n\n\xc3\x84rger\n")
    assert list(read_texts(path, "text")) == ["Chapter 1\n\nÄrger\n"]


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.jsonl.zst"])
def test_json_lines_hold_one_document_each(tmp_path, name):
    path = tmp_path / name
    data = '{"id": 1, "body": "a\\nb"}\n\n{"body": "Ä"}\n{"body": ""}'.encode()
    with pyarrow.output_stream(str(path), compression=COMPRESSIONS[path.suffix]) as file:
        file.write(data)
    assert list(read_texts(path, "body")) == ["a\nb", "Ä", ""]


def test_a_file_is_read_as_it_is_consumed(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "first"}\nbroken\n')
    assert list(itertools.islice(read_texts(path, "text"), 1)) == ["first"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"text": "a"',
            "dataloader.path: {at} is not JSON (Expecting ',' delimiter at column 13); mend or remove the line",
        ),
        (b'["a"]', "dataloader.path: {at} is a JSON list, not an object; write one object a line"),
        (
            b'{"id": 1, "body": "a"}',
            "dataloader.text_field: 'text' is not in {at}, which has 'id', 'body'; name the field with the text",
        ),
        (b"{}", "dataloader.text_field: 'text' is not in {at}, which has no fields; name the field with the text"),
        (b'{"text": 5}', "dataloader.text_field: 'text' in {at} is 5, not text; name a field that holds text"),
        (b'{"text": "\xff"}', "dataloader.path: {at} is not UTF-8 (byte 0xff at offset 10); convert it to UTF-8"),
        (
            b'{"text": "\\ud800"}',
            "dataloader.path: 'text' in {at} holds half a surrogate pair (\\ud800 to \\udfff), which is no character; "
            "mend or remove the line",
        ),
    ],
    ids=["broken", "list", "other-fields", "no-fields", "number", "not-utf8", "surrogate"],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps({"text": "good"}).encode() + b"\n\n" + line + b"\n")
    assert message_of(path) == message.replace("{at}", f"{path}:3")


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"text": ' + b"1" * 5000 + b"}"], ids=["deep", "digits"])
def test_a_line_beyond_what_python_reads_is_named(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_bytes(line)
    message = message_of(path)
    assert message.startswith(f"dataloader.path: {path}:1 cannot be read (")
    assert message.endswith("; mend or remove the line")


def test_a_text_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("Ärger".encode("latin-1"))
    assert message_of(path) == f"dataloader.path: {path} is not UTF-8 (byte 0xc4 at offset 0); convert it to UTF-8"


def test_files_that_cannot_be_read_are_refused(tmp_path):
    no_gzip, cut = tmp_path / "plain.jsonl.gz", tmp_path / "cut.jsonl.gz"
    no_gzip.write_bytes(b'{"text": "a"}\n')
    cut.write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-12])
    assert message_of(no_gzip).startswith(f"dataloader.path: {no_gzip} cannot be read (Not a gzipped file")
    assert message_of(cut).startswith(f"dataloader.path: {cut} cannot be read (Compressed file ended")
    assert message_of(tmp_path / "gone.txt").startswith(f"dataloader.path: {tmp_path / 'gone.txt'} does not exist; ")


def test_bad_lines_are_skipped_and_counted_when_asked(tmp_path, caplog):
    path = tmp_path / "data.jsonl"
    lines = [b'{"text": "1 2"}', b'{"text": "\xff"}', b"broken", b'{"id": 3}', b'{"text": "3"}', b"[]", b'{"text": ""}']
    path.write_bytes(b"\n".join(lines))
    source = choose_source(str(path)).build(on_error="skip")
    transform = PlainTextTransform.Config().build(tokenizer=NumberTokenizer(), seq_len=8)
    documents = read_documents(source, iter(source), transform, vocab_size=10, on_error="skip")
    assert documents.token_ids.tolist() == [1, 2, 9, 3, 9]
    assert documents.counts == {"unreadable documents skipped": 4, "empty texts left out": 1}
    assert [record.message.partition(" is ")[0] for record in caplog.records] == [
        f"skipped: dataloader.path: {path}:2",
        f"skipped: dataloader.path: {path}:3",
        f"skipped: dataloader.path: {path}:6",
        "skipped: dataloader.text_field: 'text'",
    ]
