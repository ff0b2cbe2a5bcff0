"""A saved tokenizer without transformers, which takes a second to import."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from hyper_parallel.components.data.indexed.pair_format import smallest_dtype
from hyper_parallel.components.tokenizer import BaseTokenizer, folder_faults
from hyper_parallel.config.errors import ConfigError, raise_faults

_REMEDY = "give a folder that transformers' save_pretrained() has written"


class FastTokenizer(BaseTokenizer):
    """The tokenizer in a folder; its ids are those of `HuggingFaceTokenizer`."""

    def __init__(self, folder: str, given_by: str = "--tokenizer") -> None:
        """Loads it.

        Raises:
            ConfigError: at the path `given_by`: the folder holds no tokenizer, or one that transformers would change.
        """
        raise_faults(folder_faults(Path(folder), given_by))
        file, config_file = Path(folder) / "tokenizer.json", Path(folder) / "tokenizer_config.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
            config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        except Exception as error:  # tokenizers raises plain Exception for a file that it cannot read
            raise ConfigError.one(given_by, f"the tokenizer in {folder} cannot be read ({error})", _REMEDY) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for number, token in config.get("added_tokens_decoder", {}).items():
            if self._tokenizer.token_to_id(_text_of(token)) != int(number):
                fact = f"{config_file} adds the token {_text_of(token)!r}, which {file.name} does not hold as {number}"
                raise ConfigError.one(given_by, fact, _REMEDY)
        eos = config.get("eos_token")
        eos_id = None if eos is None else self._tokenizer.token_to_id(_text_of(eos))
        if eos_id is None:
            fact = f"{config_file} names no EOS token" if eos is None else f"{file} lacks the EOS token {eos!r}"
            raise ConfigError.one(given_by, fact, 'add the key "eos_token" with the token that ends a text')
        self.eos_id = self.pad_id = eos_id
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.dtype = smallest_dtype(self.vocab_size)
        self.fingerprint = hashlib.blake2b(file.read_bytes() + eos_id.to_bytes(4), digest_size=16).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # Offsets, which the fast one leaves out, are no use here.
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_flat(self, texts: Sequence[str], *, append_eod: bool) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """(ids of all texts [tokens], tokens of each text [texts]); `append_eod` ends each text that has a token."""
        documents = self.encode_batch(texts)
        if append_eod:
            for ids in documents:
                if ids:
                    ids.append(self.eos_id)
        lengths = np.fromiter(map(len, documents), np.int32, len(documents))
        return np.fromiter(itertools.chain.from_iterable(documents), self.dtype, lengths.sum(dtype=np.int64)), lengths

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _text_of(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token
