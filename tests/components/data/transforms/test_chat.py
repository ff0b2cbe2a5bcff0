"""Chats: what the template writes, and that only the answers are trained."""

from __future__ import annotations

import json

import pytest

from hyper_parallel.assets import TOKENIZER_FOLDER
from hyper_parallel.components.data.reading import read_documents
from hyper_parallel.components.data.sources.source import Record
from hyper_parallel.components.data.transforms import ChatTransform
from hyper_parallel.components.tokenizer import HuggingFaceTokenizer, TokenIdTokenizer
from hyper_parallel.config.errors import ConfigError

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who goes there?"},
    {"role": "assistant", "content": "A friend."},
    {"role": "user", "content": "Whose?"},
    {"role": "assistant", "content": "The king's."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return HuggingFaceTokenizer.Config().build()


def documents_of(tokenizer, tmp_path, *chats, template=PLAIN, seq_len=200):
    (tmp_path / "template.jinja").write_text(template)
    config = ChatTransform.Config(template=str(tmp_path / "template.jinja"))
    transform = config.build(tokenizer=tokenizer, seq_len=seq_len)
    source = [Record({"messages": chat}, f"chats.jsonl:{i + 1}") for i, chat in enumerate(chats)]
    return read_documents(source, iter(source), transform, vocab_size=tokenizer.vocab_size)


def trained_text(tokenizer, documents) -> str:
    return tokenizer.decode(documents.token_ids[documents.trained].tolist())


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_only_the_answers_are_trained_each_with_its_end(tokenizer, tmp_path, template):
    documents = documents_of(tokenizer, tmp_path, CHAT, template=template)
    assert tokenizer.decode(documents.token_ids.tolist()) == (
        "<system>Be brief.\n<user>Who goes there?\n<assistant>A friend.<|endoftext|>\n"
        "<user>Whose?\n<assistant>The king's.<|endoftext|>"
    )
    assert trained_text(tokenizer, documents) == "A friend.<|endoftext|>The king's.<|endoftext|>"


def test_the_tokens_are_those_that_transformers_gives(tokenizer, tmp_path):
    whole = tokenizer._tokenizer.apply_chat_template(
        CHAT, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    for template in (PLAIN, MARKED):
        documents = documents_of(tokenizer, tmp_path, CHAT, template=template)
        n = len(documents.token_ids)
        assert documents.token_ids.tolist() == whole["input_ids"][:n]
        assert documents.trained.tolist() == [bool(x) for x in whole["assistant_masks"]][:n]
        assert not any(whole["assistant_masks"][n:])


def test_a_token_that_reaches_into_an_answer_is_trained(tokenizer, tmp_path):
    """The template ends the prompt in a blank, which is one token with the first letter of the answer."""
    template = PLAIN.replace("<assistant>", "assistant: ").replace("<{{ m.role }}>", "{{ m.role }}: ")
    documents = documents_of(tokenizer, tmp_path, CHAT[1:3], template=template)
    assert trained_text(tokenizer, documents) == " A friend.<|endoftext|>"


def test_a_turn_that_ends_with_another_token_than_eos(tokenizer, tmp_path):
    """Without EOS in the template the last answer goes to the end of the text, and EOS is added."""
    documents = documents_of(tokenizer, tmp_path, CHAT[1:3], template=CHATML)
    assert trained_text(tokenizer, documents) == "A friend.<|im_end|>\n<|endoftext|>"


def test_no_turn_of_the_user_is_trained_where_turns_do_not_end_with_eos(tokenizer, tmp_path):
    trained = trained_text(tokenizer, documents_of(tokenizer, tmp_path, CHAT, template=CHATML))
    assert trained == "A friend.<|im_end|>\nThe king's.<|im_end|>\n<|endoftext|>"


def test_a_prompt_beyond_the_row_is_dropped_and_counted(tokenizer, tmp_path):
    long_prompt = [{"role": "user", "content": "word " * 50}, {"role": "assistant", "content": "Yes."}]
    no_answer = CHAT[:2]
    long_answer = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "on " * 50}]
    documents = documents_of(tokenizer, tmp_path, CHAT, long_prompt, no_answer, [], long_answer, seq_len=40)
    assert documents.counts == {
        "chats with a prompt longer than training.seq_len left out": 1,
        "chats without an answer left out": 2,
        "chats cut to training.seq_len": 1 + (len(documents_of(tokenizer, tmp_path, CHAT).token_ids) > 41),
    }
    assert len(documents.lengths) == 2
    assert documents.lengths[1] == 41
    assert documents.trained[documents.offsets[1] :].any()


@pytest.mark.parametrize("over", [0, 1])
def test_the_limit_of_a_prompt_is_exact(tokenizer, tmp_path, over):
    """A prompt of seq_len tokens leaves one token to predict; one more leaves none."""
    chat = CHAT[1:3]
    prompt = documents_of(tokenizer, tmp_path, chat).trained.tolist().index(True)
    documents = documents_of(tokenizer, tmp_path, chat, seq_len=prompt - over)
    assert len(documents.lengths) == 1 - over
    if not over:
        assert documents.trained.tolist() == [False] * prompt + [True]


def test_labels_in_a_row(tokenizer, tmp_path):
    (tmp_path / "template.jinja").write_text(PLAIN)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT[1:3]}) + "\n")
    from hyper_parallel.components.data import TextDataLoader

    def row(packing):
        config = TextDataLoader.Config(
            path=str(tmp_path / "chats.jsonl"),
            transform=ChatTransform.Config(template=str(tmp_path / "template.jinja")),
            packing=packing,
        )
        loader = config.build(
            tokenizer=tokenizer, seq_len=40, micro_batch_size=1, global_batch_size=1, dp_rank=0, dp_size=1, seed=0
        )
        (batch,) = next(loader)
        loader.close()
        return batch["input_ids"][0], batch["labels"][0]

    for packing in ("pad", "best_fit"):
        ids, labels = row(packing)
        places = (labels != -100).nonzero().reshape(-1).tolist()
        assert tokenizer.decode(labels[places].tolist()) == "A friend.<|endoftext|>"
        assert ids[[place + 1 for place in places[:-1]]].tolist() == labels[places[:-1]].tolist()
        assert tokenizer.decode(ids[: places[0] + 1].tolist()) == "<user>Who goes there?\n<assistant>"


def refusal(tokenizer, tmp_path, chat, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        documents_of(tokenizer, tmp_path, chat, **options)
    return str(caught.value)


@pytest.mark.parametrize("chat", ["hello", [{"role": "user"}], [["user", "hello"]], None, {"role": "user"}])
def test_what_is_no_chat_is_refused(tokenizer, tmp_path, chat):
    message = refusal(tokenizer, tmp_path, chat)
    assert message.startswith("dataloader.transform.field: 'messages' in chats.jsonl:1 is ")
    assert message.endswith("not a list of turns with role and content; name a field that holds the turns of a chat")


def test_templates_that_cannot_serve(tokenizer, tmp_path):
    hiding = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert "it does not tell where turn 3 of a chat begins" in refusal(tokenizer, tmp_path, CHAT, template=hiding)
    failing = "{{ raise_exception('no system turn') }}"
    assert "it refuses a chat (no system turn)" in refusal(tokenizer, tmp_path, CHAT, template=failing)
    assert [str(f) for f in ChatTransform.Config(template="gone.jinja").faults()] == [
        "template: gone.jinja is no file; give a file with a Jinja template"
    ]


def test_tokenizers_without_a_template():
    with pytest.raises(ConfigError, match=r"^tokenizer: it has no chat template; give dataloader\.transform\.template"):
        HuggingFaceTokenizer.Config(path=str(TOKENIZER_FOLDER)).build().encode_chat(CHAT)
    with pytest.raises(ConfigError, match=r"^tokenizer: TokenIdTokenizer knows no chats"):
        TokenIdTokenizer.Config(vocab_size=5).build().encode_chat(CHAT)
