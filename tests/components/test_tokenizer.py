from __future__ import annotations

import json
import logging
import shutil

import pytest

from hyper_parallel.assets import TOKENIZER_FOLDER
from hyper_parallel.components.tokenizer import HuggingFaceTokenizer, TokenIdTokenizer
from hyper_parallel.config.errors import ConfigError

TEXT = "  To be, or not to be:\tthat is the question.\n\nÄ 你 <|endoftext|> 🙂"


def folder_with(path, **settings):
    """The embedded tokenizer under another tokenizer_config.json."""
    path.mkdir()
    shutil.copy(TOKENIZER_FOLDER / "tokenizer.json", path)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def refusal(config: HuggingFaceTokenizer.Config, **runtime) -> str:
    with pytest.raises(ConfigError) as caught:
        config.build(**runtime)
    return str(caught.value)


def test_the_embedded_tokenizer_is_used_when_none_is_given(caplog):
    with caplog.at_level(logging.INFO, logger="hyper_parallel"):
        tokenizer = HuggingFaceTokenizer.Config().build(hf_assets_path=None)
    assert caplog.messages == [f"tokenizer: none given, using the embedded byte-level BPE in {TOKENIZER_FOLDER}"]
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (0, 1, 4096)


def test_every_text_comes_back():
    tokenizer = HuggingFaceTokenizer.Config().build()
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode_batch([TEXT, "", "To be"]) == [ids, [], tokenizer.encode("To be")]


def test_ids_are_those_of_transformers_and_tokenizers():
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    tokenizer = HuggingFaceTokenizer.Config().build()
    raw = Tokenizer.from_file(str(TOKENIZER_FOLDER / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(TOKENIZER_FOLDER)
    assert tokenizer.encode(TEXT) == raw.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.encode(TEXT) == auto(TEXT, add_special_tokens=False)["input_ids"]
    assert (auto.eos_token_id, auto.pad_token_id, len(auto)) == (0, 1, 4096)


def test_no_special_token_is_put_around_a_text(tmp_path):
    from tokenizers import Tokenizer, processors

    folder = folder_with(tmp_path / "bos", eos_token="<|endoftext|>")
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", 1)])
    raw.save(str(folder / "tokenizer.json"))
    assert raw.encode("To be").ids[0] == 1
    assert HuggingFaceTokenizer.Config(path=str(folder)).build().encode("To be") == raw.encode("To be").ids[1:]


def test_path_goes_before_hf_assets_path(tmp_path, caplog):
    own = folder_with(tmp_path / "own", eos_token="<|pad|>")
    model = folder_with(tmp_path / "model", eos_token="<|endoftext|>")
    with caplog.at_level(logging.INFO, logger="hyper_parallel"):
        assert HuggingFaceTokenizer.Config(path=str(own)).build(hf_assets_path=str(model)).eos_id == 1
        assert HuggingFaceTokenizer.Config().build(hf_assets_path=str(model)).eos_id == 0
    assert caplog.messages == []


def test_without_a_pad_token_eos_fills_padding(tmp_path):
    tokenizer = HuggingFaceTokenizer.Config(path=str(folder_with(tmp_path / "t", eos_token="<|endoftext|>"))).build()
    assert (tokenizer.eos_id, tokenizer.pad_id) == (0, 0)


def test_the_vocabulary_reaches_to_the_largest_id(tmp_path):
    """A token that tokenizer_config.json adds needs a row in the model's embedding too."""
    folder = folder_with(tmp_path / "t", eos_token="<|end of document|>")
    tokenizer = HuggingFaceTokenizer.Config(path=str(folder)).build()
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (4096, 4097)


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    folder = folder_with(tmp_path / "t", pad_token="<|pad|>")
    expected = (
        f"{folder / 'tokenizer_config.json'} names no EOS token, so documents would run into each other; "
        'add the key "eos_token" with the token that ends a text'
    )
    assert refusal(HuggingFaceTokenizer.Config(path=str(folder))) == f"tokenizer.path: {expected}"
    assert refusal(HuggingFaceTokenizer.Config(), hf_assets_path=str(folder)) == f"hf_assets_path: {expected}"


def test_folders_without_a_tokenizer_are_refused(tmp_path):
    remedy = "give a folder with a tokenizer.json, as transformers' save_pretrained() writes it"
    missing, file, model = tmp_path / "missing", tmp_path / "file", tmp_path / "model"
    file.write_text("")
    model.mkdir()
    # transformers alone would make an empty tokenizer of one token out of this.
    (model / "config.json").write_text('{"model_type": "qwen3_moe"}')
    assert refusal(HuggingFaceTokenizer.Config(path=str(missing))) == f"tokenizer.path: {missing} is missing; {remedy}"
    assert refusal(HuggingFaceTokenizer.Config(path=str(file))) == f"tokenizer.path: {file} is not a folder; {remedy}"
    assert refusal(HuggingFaceTokenizer.Config(), hf_assets_path=str(model)) == (
        f"hf_assets_path: {model} holds no tokenizer.json; {remedy}"
    )


@pytest.mark.parametrize("content", ["", "{", "{}", '{"version": "1.0"}'])
def test_a_broken_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    assert refusal(HuggingFaceTokenizer.Config(path=str(tmp_path))).startswith(
        f"tokenizer.path: the tokenizer in {tmp_path} cannot be read ("
    )


def test_text_that_is_token_ids_already():
    tokenizer = TokenIdTokenizer.Config(vocab_size=12).build()
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (12, 11, 11)
    assert tokenizer.encode_batch(["3 0 11", ""]) == [[3, 0, 11], []]
    assert tokenizer.decode([3, 0, 11]) == "3 0 11"
    for word in ("12", "-1", "to"):
        with pytest.raises(ConfigError) as caught:
            tokenizer.encode(f"3 {word}")
        assert str(caught.value) == (
            f"tokenizer.vocab_size: {word!r} is no token id from 0 to 11; "
            "give text of ids, or a tokenizer that reads words"
        )
    with pytest.raises(ConfigError, match=r"^hf_assets_path: some/folder is given, but the tokenizer reads ids"):
        TokenIdTokenizer.Config(vocab_size=12).build(hf_assets_path="some/folder")
