"""Retrieval over distance, which perplexity hides: copying, passkeys, key-value look-up and UUIDs.

A prompt holds, for each distance, a string of random tokens, a passkey, a key-value pair and a UUID, or some of these.
It asks for all of them at its end. An answer is right if each of its tokens is the most likely one after the tokens
before it, which is what greedy decoding would give.
"""

import random
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

TASKS = ("copying", "passkey", "key-value", "uuid")
_COPIED, _GIVEN = 32, 8  # tokens of a copied string, and how many of them its repetition gives
_APART = 8  # tokens of text between questions
_NAMES = ["Anna", "Boris", "Clara", "David", "Elena", "Frank", "Grace", "Henry", "Irene", "James", "Karen", "Louis"]
_KEYS = ["apple", "bridge", "cloud", "desk", "engine", "forest", "garden", "hammer", "island", "jacket", "kettle"]
_KEYS += ["ladder", "market", "needle", "orange", "pencil", "rabbit", "silver", "table", "violin", "window", "yellow"]


class Answer(NamedTuple):
    """An answer is tokens `start` to `stop` of a prompt, and repeats what lies `distance` tokens earlier."""

    task: str
    distance: int
    start: int
    stop: int


class Prompt(NamedTuple):
    """Token ids, and the answers in them."""

    ids: list[int]
    answers: list[Answer]


def make_prompt(
    text: Sequence[int],
    length: int,
    distances: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    tasks: Sequence[str],
) -> Prompt:
    """A prompt of `length` tokens.

    Args:
        text: tokens of ordinary text, at least `length`.
        distances: in tokens, from the start of what is to be found to the start of its repetition; at most twelve.
        seed: draws strings, names and numbers.
        tasks: what to ask for, of `TASKS`.

    Raises:
        ValueError: a distance does not fit into the prompt, or distances lie too close together.
    """
    generator = random.Random(seed)
    ordinary = sorted(set(text[:length]))
    names, keys = generator.sample(_NAMES, len(_NAMES)), generator.sample(_KEYS, len(_KEYS))

    def encode(words: str) -> list[int]:
        return tokenizer(words, add_special_tokens=False)["input_ids"]

    def number() -> int:
        return generator.randrange(10000, 100000)

    questions = []  # task, distance, what is to be found, its repetition, where in that the answer begins
    for distance, name, key in zip(sorted(distances), names, keys, strict=False):
        string = [generator.choice(ordinary) for _ in range(_COPIED)]
        finds = {"copying": (string, string, _GIVEN)}
        for task, given, value, end in (
            ("passkey", f"\nThe pass key of {name} is", number(), ". Remember it.\n"),
            ("key-value", f"\n{key}:", number(), "\n"),
            ("uuid", f"\nThe identifier of the {key} is", uuid.uuid5(uuid.NAMESPACE_OID, f"{seed} {key}"), ".\n"),
        ):
            finds[task] = encode(f"{given} {value}{end}"), encode(f"{given} {value}"), len(encode(given))
        questions += [(task, distance, *finds[task]) for task in tasks]
    pairs = [encode(f"\n{key}: {number()}\n") for key in keys[len(distances) :]]

    end = length - sum(max(len(found), len(asked)) + _APART for _, _, found, asked, _ in questions)
    ids, answers, taken, at = list(text[:length]), [], [], end
    for task, distance, sentence, asked, given in questions:
        place = range(at - distance, at - distance + len(sentence))
        if place.start < 0 or place.stop > end:
            raise ValueError(f"a distance of {distance} does not fit into a prompt of {length} tokens")
        if any(place.start < other.stop and other.start < place.stop for other in taken):
            raise ValueError(f"distances {', '.join(map(str, distances))} lie too close together")
        ids[place.start : place.stop], ids[at : at + len(asked)] = sentence, asked
        answers.append(Answer(task, distance, at + given, at + len(asked)))
        taken.append(place)
        at += max(len(sentence), len(asked)) + _APART
    for pair in pairs:  # to distract: nothing asks for them
        starts = range(end - len(pair))
        free = [p for p in starts if all(p >= other.stop or p + len(pair) <= other.start for other in taken)]
        if free:
            start = generator.choice(free)
            ids[start : start + len(pair)] = pair
            taken.append(range(start, start + len(pair)))
    return Prompt(ids, answers)


def score(
    prompt: Prompt, logits_at: Callable[[list[int], list[int]], torch.Tensor]
) -> dict[str, dict[int, list[float]]]:
    """Count `[right, all, nats]` by task and distance: tokens in copying, whole answers in the other tasks.

    `nats` is the log-probability of all of them.
    `logits_at(ids, positions)` returns the logits after each position, `[P, V]`.
    """
    positions = [p - 1 for answer in prompt.answers for p in range(answer.start, answer.stop)]
    logits = logits_at(prompt.ids, positions)
    targets = torch.tensor([prompt.ids[p + 1] for p in positions], device=logits.device)
    lengths = [answer.stop - answer.start for answer in prompt.answers]
    nats = logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0].split(lengths)
    found = (logits.argmax(-1) == targets).split(lengths)
    counts: dict[str, dict[int, list[float]]] = {answer.task: {} for answer in prompt.answers}
    for answer, right, own in zip(prompt.answers, found, nats, strict=True):
        count = [right.sum().item(), len(right)] if answer.task == "copying" else [int(right.all()), 1]
        counts[answer.task][answer.distance] = [*count, own.sum().item()]
    return counts
