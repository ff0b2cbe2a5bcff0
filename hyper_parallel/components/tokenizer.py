"""Text to token ids and back."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.assets import TOKENIZER_FOLDER
from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import ConfigError, Fault, raise_faults
from hyper_parallel.config.sections import at_least

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_REMEDY = "give a folder with a tokenizer.json, as transformers' save_pretrained() writes it"


class BaseTokenizer(Configurable, ABC):
    """What the trainer and the data path ask of a tokenizer."""

    eos_id: int
    """Ends every document."""
    pad_id: int
    """Fills a row that is longer than its text. Padding is masked by length, never by this id."""
    vocab_size: int
    """One more than the largest id that `encode` can give."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens around them."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""

    def save(self, folder: Path) -> None:
        """Writes the files from which transformers loads this tokenizer, where it can be written so."""

    def encode(self, text: str) -> list[int]:
        """Token ids of one text, without special tokens around them."""
        return self.encode_batch([text])[0]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template: str | None = None
    ) -> tuple[list[int], list[bool]]:
        """Token ids of the turns of a chat, and which of them the assistant says: what ends its turn included.

        Args:
            messages: turns with `role` and `content`.
            template: Jinja chat template; None for the tokenizer's own.

        Raises:
            ConfigError: there is no template, or it does not tell the assistant's part.
        """
        raise ConfigError.one("tokenizer", f"{type(self).__name__} knows no chats", "give one that does")


class HuggingFaceTokenizer(BaseTokenizer):
    """A tokenizer saved by Hugging Face transformers or tokenizers; the package's own where none is given."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        path: str | None = None
        """Folder with a tokenizer's files. None: `hf_assets_path`, and without that the tokenizer in the package."""

        def faults(self) -> Iterator[Fault]:
            if self.path is not None:
                yield from folder_faults(Path(self.path), "path")

    def __init__(self, config: Config, *, hf_assets_path: str | None = None) -> None:
        """Loads the tokenizer from `config.path`, else `hf_assets_path`, else the package.

        Raises:
            ConfigError: the folder does not exist, holds no readable tokenizer, or the tokenizer names no EOS token.
        """
        given_by, folder = "tokenizer.path", config.path
        if folder is None and hf_assets_path is not None:
            given_by, folder = "hf_assets_path", hf_assets_path
        if folder is None:
            logger.info("tokenizer: none given, using the embedded byte-level BPE in %s", TOKENIZER_FOLDER)
            folder = str(TOKENIZER_FOLDER)
        self._take(_load(Path(folder), given_by), given_by, str(Path(folder) / "tokenizer_config.json"))

    def _take(self, tokenizer: Any, given_by: str, name: str) -> None:
        self._tokenizer = tokenizer
        if self._tokenizer.eos_token_id is None:
            raise ConfigError.one(
                given_by,
                f"{name} names no EOS token, so documents would run into each other",
                'add the key "eos_token" with the token that ends a text',
            )
        self.eos_id = self._tokenizer.eos_token_id
        pad_id = self._tokenizer.pad_token_id
        # Any id can fill padding, so a tokenizer without a pad token needs no new vocabulary entry.
        self.pad_id = self.eos_id if pad_id is None else pad_id
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # verbose=False: documents longer than the model's context are cut by packing, so no warning is due.
        encoding = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return encoding["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)  # type: ignore[return-value]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template: str | None = None
    ) -> tuple[list[int], list[bool]]:
        from hyper_parallel.components.chat_template import answer_spans

        text, spans = answer_spans(self._tokenizer, messages, template)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        # A token that begins before an answer and reaches into it is of the answer: nothing else says its beginning.
        trained = [any(a < end and start < b for a, b in spans) for start, end in encoding["offset_mapping"]]
        return encoding["input_ids"], trained

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


class AdoptedTokenizer(HuggingFaceTokenizer):
    """A tokenizer of transformers that a target has made."""

    def __init__(self, tokenizer: Any) -> None:
        """
        Raises:
            ConfigError: it names no EOS token.
        """
        self._take(tokenizer, "tokenizer", type(tokenizer).__name__)
        self.product = tokenizer
        """What datasets and transforms of the user's are given."""


def adopted_tokenizer(product: Any) -> BaseTokenizer:
    """`product` of the tokenizer slot as one of ours.

    Raises:
        ConfigError: it is neither that nor a tokenizer of transformers.
    """
    if isinstance(product, BaseTokenizer):
        return product
    if hasattr(product, "get_vocab") and hasattr(product, "eos_token_id"):
        return AdoptedTokenizer(product)
    fact = f"the target made a {type(product).__name__}, which is neither a BaseTokenizer nor one of transformers"
    raise ConfigError.one("tokenizer", fact, "give transformers.AutoTokenizer.from_pretrained with a folder")


class TokenIdTokenizer(BaseTokenizer):
    """A text that is token ids already, as in "17 4 0": for synthetic data, and data that others have tokenised."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """How many ids there are."""

        vocab_size: int
        """Entries of the vocabulary. The last one ends documents, and fills rows."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 1, "vocab_size")

    def __init__(self, config: Config, *, hf_assets_path: str | None = None) -> None:
        """Needs no file.

        Raises:
            ConfigError: `hf_assets_path` is given, so words are to be read.
        """
        if hf_assets_path is not None:
            raise ConfigError.one(
                "hf_assets_path", f"{hf_assets_path} is given, but the tokenizer reads ids, not words", "remove it"
            )
        self.vocab_size = config.vocab_size
        self.eos_id = self.pad_id = config.vocab_size - 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._id(word) for word in text.split()] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def _id(self, word: str) -> int:
        if not (word.isdecimal() and int(word) < self.vocab_size):
            raise ConfigError.one(
                "tokenizer.vocab_size",
                f"{word!r} is no token id from 0 to {self.vocab_size - 1}",
                "give text of ids, or a tokenizer that reads words",
            )
        return int(word)


def folder_faults(folder: Path, given_by: str) -> Iterator[Fault]:
    """Why no tokenizer can be in `folder`, at the path `given_by`."""
    if not folder.is_dir():
        yield Fault(given_by, f"{folder} is {'not a folder' if folder.exists() else 'missing'}", _REMEDY)
    elif not (folder / "tokenizer.json").is_file():
        # AutoTokenizer would make an empty tokenizer out of a folder with a model's config.json alone.
        yield Fault(given_by, f"{folder} holds no tokenizer.json", _REMEDY)


def _load(folder: Path, given_by: str) -> PreTrainedTokenizerFast:
    raise_faults(folder_faults(folder, given_by))

    from transformers import PreTrainedTokenizerFast  # AutoTokenizer takes over a second longer to import

    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError.one(given_by, f"the tokenizer in {folder} cannot be read ({error})", _REMEDY) from error
