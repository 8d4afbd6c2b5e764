"""Conversations and completions: their tokens, and those that the loss is taken on, are TRL's."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tiny import save_byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moh_llm.data.mixture import load_mixture
from moh_llm.data.records import source_documents
from moh_llm.data.sample import sample_mixture
from moh_llm.data.shards import open_tokens, tokens_for
from moh_llm.data.tokenize import tokenize_mixture
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.data.windows import validation_batches
from moh_llm.errors import UserError

# As SmolLM2's: no {% generation %} markers, a system message of its own.
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nBe kind."
    "<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == "
    "'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ message['content'] }}{% if tools %}{{ tools | tojson }}{% endif %}{% if loud %}!{% endif %}<|im_end|>"
    "{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end|>"]
SPECIAL += ["<|user|>", "<|assistant|>", "<|system|>", "<start_of_turn>", "<end_of_turn>"]


def say(*texts: str, first: str = "user") -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    other = {"user": "assistant", "assistant": "user"}
    return [{"role": first if i % 2 == 0 else other[first], "content": text} for i, text in enumerate(texts)]


TALKS = [
    say("What was high?", "The river was high.", "Again", "  high that spring\n"),
    say("été 文 🙂", "🙂 naïve 🙂"),
    say("The boats", "lay tied", "to", "the poplars", "below", "the mill. "),
]
PAIRS = [
    {"prompt": "The river was", "completion": " high that spring"},
    {"prompt": "The answer is ", "completion": "the mill 🙂"},
    {"prompt": "", "completion": "the boats"},
]
CONVERSATIONS = [{"prompt": talk[:-1], "completion": talk[-1:]} for talk in TALKS]


@pytest.fixture
def words() -> PreTrainedTokenizerFast:
    """A BPE tokenizer with merges over spaces, which begins texts with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<end>", *SPECIAL])
    text = "The river was high that spring, and the boats lay tied to the poplars below the mill. The answer is "
    tokenizer.train_from_iterator([text] * 4, trainer)
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<s>")


@pytest.fixture(scope="module")
def trl_labels(make_llama, tmp_path_factory):
    """`trl_labels(tokenizer, records)`: ids and labels that TRL's SFTTrainer prepares."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    folder, output = make_llama(vocab_size=600), tmp_path_factory.mktemp("trl")

    def labels(tokenizer: PreTrainedTokenizerFast, records: list[dict]) -> list[tuple[list[int], list[int]]]:
        model = AutoModelForCausalLM.from_pretrained(folder)
        arguments = trl.SFTConfig(
            output_dir=output,
            max_length=None,
            assistant_only_loss="messages" in records[0],
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        tokenizer.pad_token = tokenizer.eos_token
        trainer = trl.SFTTrainer(model, arguments, train_dataset=Dataset.from_list(records), processing_class=tokenizer)
        return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]

    return labels


def write_mixture(folder: Path, kind: str, records: list[dict], **source: object) -> Path:
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    content = {"validation_share": 0.2, "sources": {"a": {"weight": 1, "files": "a.jsonl", "type": kind, **source}}}
    path = folder / "mixture.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


def own_labels(tokenizer, kind: str, records: list[dict], folder: Path) -> list[tuple[list[int], list[int]]]:
    """The same as MoH-LLM makes them."""
    return labels_of(tokenizer, write_mixture(folder, kind, records))


def labels_of(tokenizer, mixture: Path) -> list[tuple[list[int], list[int]]]:
    own, (source,) = TextTokenizer.from_tokenizer(tokenizer), load_mixture(mixture).sources
    found = own.encode(source_documents(source, template=own.chat))
    return [(ids.tolist(), np.where(targets, ids.astype(int), -100).tolist()) for _, ids, targets in found]


def template(name: str) -> str:
    """A chat template that TRL carries."""
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["llama3", "phi3", "gemma", "marked"])
def test_of_messages_the_assistants_tokens_are_trls(words, trl_labels, tmp_path, name):
    # TRL puts a template with markers in the place of those that it knows; here they are found without.
    words.chat_template = MARKED if name == "marked" else template(name)
    records = [{"messages": talk} for talk in TALKS]
    wanted = trl_labels(words, records)
    assert all(0 < sum(label == -100 for label in labels) < len(ids) for ids, labels in wanted)
    assert own_labels(words, "messages", records, tmp_path) == wanted
    # Offsets that leave leading spaces out make no difference; transformers loses all from such a turn on.
    words.backend_tokenizer.post_processor[0] = processors.ByteLevel(trim_offsets=True)
    assert own_labels(words, "messages", records, tmp_path) == wanted


@pytest.mark.parametrize("records", [PAIRS, CONVERSATIONS], ids=["texts", "messages"])
@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_of_completions_they_are_trls(words, trl_labels, tmp_path, kind, records):
    if kind == "bytes":
        save_byte_tokenizer(tmp_path)
        words = AutoTokenizer.from_pretrained(tmp_path)
    words.chat_template = CHATML
    wanted = trl_labels(words, records)
    assert all(0 < sum(label == -100 for label in labels) < len(ids) for ids, labels in wanted[:2])
    assert own_labels(words, "prompt_completion", records, tmp_path) == wanted


def test_tools_and_arguments_of_the_template_are_trls(words, trl_labels, tmp_path):
    words.chat_template = MARKED
    records = [
        {"messages": TALKS[0], "tools": json.dumps([{"name": "sail"}]), "chat_template_kwargs": {"loud": True}},
        {"messages": TALKS[1], "tools": json.dumps([{"name": "row"}]), "chat_template_kwargs": {"loud": False}},
    ]
    wanted = trl_labels(words, records)
    assert "sail" in words.decode(wanted[0][0]) and "!" in words.decode(wanted[0][0])
    assert own_labels(words, "messages", records, tmp_path) == wanted


def test_only_the_assistant_counts_where_a_completion_has_others(words, tmp_path):
    words.chat_template = CHATML
    ((ids, labels),) = own_labels(
        words, "prompt_completion", [{"prompt": TALKS[2][:1], "completion": TALKS[2][1:]}], tmp_path
    )
    counted = words.decode([label for label in labels if label != -100])
    assert counted == "lay tied<|im_end|>\nthe poplars<|im_end|>\nthe mill. <|im_end|>\n"
    assert len(ids) == len(labels)


BAD = {
    "no field": ({"text": "a"}, "messages", "line 1: no field messages; correct it"),
    "no role": ({"messages": [{"content": "a"}]}, "messages", "its messages must be maps with role and content"),
    "no assistant": ({"messages": say("a")}, "messages", "no message is the assistant's"),
    "nothing": ({"prompt": "a", "completion": ""}, "prompt_completion", "its completion is empty"),
    "refused": ({"messages": say("a", "b", first="assistant")}, "messages", "cannot write it: begin with the user"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_is_named(words, tmp_path, case):
    record, kind, message = BAD[case]
    refusal = "{{ raise_exception('begin with the user') }}"
    words.chat_template = f"{{% if messages[0]['role'] == 'assistant' %}}{refusal}{{% endif %}}{CHATML}"
    with pytest.raises(UserError) as error:
        own_labels(words, kind, [record], tmp_path)
    assert f"{tmp_path}/a.jsonl, line 1: " in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_template_that_rewrites_earlier_turns_is_refused(words, tmp_path):
    pytest.importorskip("trl")
    words.chat_template = template("qwen3")  # writes empty thoughts into the last turn only
    assert own_labels(words, "messages", [{"messages": TALKS[1]}], tmp_path)  # of one turn it does not
    with pytest.raises(UserError, match=r"up to message 2 differently .* \{% generation %\}"):
        own_labels(words, "messages", [{"messages": TALKS[0]}], tmp_path)
    words.chat_template = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    with pytest.raises(UserError, match="so the assistant's text cannot be found"):
        own_labels(words, "messages", [{"messages": TALKS[0]}], tmp_path)


@pytest.fixture
def chats(tmp_path) -> Path:
    """A mixture of conversations and of text."""
    records = [{"messages": say(f"{i}?", f"answer {i}")} for i in range(60)]
    path = write_mixture(tmp_path, "messages", records)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"The river {i}. " * 3}) + "\n" for i in range(60)))
    content = json.loads(path.read_text())
    content["sources"]["b"] = {"weight": 1, "files": "b.jsonl"}
    path.write_text(json.dumps(content))
    return path


def test_shards_say_which_tokens_count(words, chats, tmp_path):
    words.chat_template = CHATML
    mixture = load_mixture(chats)
    record = tokenize_mixture(mixture, TextTokenizer.from_tokenizer(words), tmp_path / "out", workers=2)
    stored, held = (
        open_tokens(tmp_path / "out", tokenizer=TextTokenizer.from_tokenizer(words)),
        sample_mixture(mixture, words),
    )
    for one, other in zip(stored, held, strict=True):
        for side in ("train", "validation"):
            a, b = getattr(one, side), getattr(other, side)
            assert len(a) == len(b) > 0 and np.array_equal(a.read(0, len(a))[0], b.read(0, len(b))[0])
            if one.name == "a":
                assert np.array_equal(a.targets(3, len(a) - 5), b.targets(3, len(b) - 5))
            else:
                assert a.targets(0, len(a)) is b.targets(0, len(b)) is None
    train = stored[0].train
    counted = train.read(0, len(train))[0][train.targets(0, len(train))]
    assert all("answer" in turn for turn in words.decode(counted).split("<|im_end|>\n")[:-1])
    assert record.sources["a"].loss_tokens == sum(
        int(stream.targets(0, len(stream)).sum()) for stream in (train, stored[0].validation)
    )
    assert record.sources["b"].loss_tokens is None and not list((tmp_path / "out" / "b").glob("*.loss"))
    # Windows take them over: a label is missing where a document begins or nothing counts.
    labels = np.concatenate([batch["labels"].numpy().ravel() for batch in validation_batches(stored, 64, 10_000, 4)])
    assert 0.3 < (labels == -100).mean() < 0.9


def test_another_template_is_another_text(words, chats, tmp_path):
    words.chat_template = CHATML
    tokenize_mixture(load_mixture(chats), TextTokenizer.from_tokenizer(words), tmp_path / "out", workers=1)
    first = tokens_for(str(chats), words).folder
    assert tokens_for(str(tmp_path / "out"), words).sources[0].sha256
    words.chat_template = MARKED
    with pytest.raises(UserError, match="were made with another template"):
        tokens_for(str(tmp_path / "out"), words)
    with pytest.raises(UserError, match="made with another chat_template"):
        tokenize_mixture(load_mixture(chats), TextTokenizer.from_tokenizer(words), tmp_path / "out", workers=1)
    assert tokens_for(str(chats), words).folder != first
    words.chat_template = None
    with pytest.raises(UserError, match=r"source a has messages, and tokenizer .* has no chat template"):
        tokens_for(str(chats), words)


@pytest.mark.parametrize("name", ["llama3_2", None])
def test_text_does_not_depend_on_the_day(words, tmp_path, name):
    words.chat_template = template(name) if name else '{{ strftime_now("%d %B %Y") }}\n' + CHATML
    mixture = load_mixture(write_mixture(tmp_path, "messages", [{"messages": TALKS[0]}]))
    (source,) = sample_mixture(mixture, words)
    text = words.decode(source.train.read(0, len(source.train))[0])
    assert ("26 Jul 2024" if name else "26 July 2024") in text + words.decode(
        source.validation.read(0, len(source.validation))[0]
    )


def test_parquet_gives_what_json_gives(words, tmp_path):
    words.chat_template = MARKED
    records = [{"messages": talk} for talk in TALKS]
    records[1]["messages"][0]["name"] = "Ann"  # the others have none in their column
    wanted = own_labels(words, "messages", records, tmp_path)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    path = tmp_path / "mixture.yaml"
    path.write_text(path.read_text().replace("a.jsonl", "a.parquet"))
    assert labels_of(words, path) == wanted
