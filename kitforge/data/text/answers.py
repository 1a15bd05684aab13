"""Questions whose answers are spans of a passage: rows, windows over long passages, and the metrics of SQuAD."""

import collections
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kitforge.data.document_shard import column_value, document_of
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.errors import DataError

_ARTICLES, _PUNCTUATION = re.compile(r"\b(a|an|the)\b"), str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageQuestion:
    """A question, its passage, and its answers, none where the passage does not answer it."""

    question: str
    context: str
    answers: tuple[tuple[str, int], ...]  # each text, and where in the passage it begins


def questions_of(row: Any, columns: tuple[str, str, str], location: object) -> Iterator[tuple[str, Any]]:
    """Location and row of every question of a row: the row itself, or those of SQuAD's JSON or an article of it.
    `columns` are those of question, passage and answers."""
    articles = row.get("data", [row]) if isinstance(row, Mapping) else [row]
    if not all(isinstance(each, Mapping) and "paragraphs" in each for each in articles):
        yield str(location), row
        return
    for number, paragraph in enumerate(each for article in articles for each in article["paragraphs"]):
        for each in paragraph["qas"]:
            answers = [] if each.get("is_impossible") else each["answers"]
            values = zip(columns, (each["question"], paragraph["context"], answers), strict=True)
            yield f"{location}, paragraph {number}, question {each.get('id')}", dict(values)


def question_of(row: object, columns: tuple[str, str, str], location: object) -> PassageQuestion:
    """The question of a row. Answers are a list of `{"text", "answer_start"}`, or one such object of lists as in
    `datasets`; without a beginning an answer is where its text first occurs. Raises DataError for a text that is
    missing or empty, and for an answer that does not occur in its passage where it is said to."""
    names = dict(zip(columns, ("data.question", "data.context"), strict=False))
    question, context = (document_of(row, name, "strict", location, option) for name, option in names.items())
    if not question.strip() or not context.strip():
        raise DataError(f"{location} is not a question", got="an empty text", expected="a question and a passage")
    found = column_value(row, columns[2], location, "data.answers")
    entries: Any = found if found is not None else []
    if isinstance(entries, Mapping):
        texts = list(entries.get("text", ()))
        starts = list(entries.get("answer_start", [None] * len(texts)))
        entries = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    answers = []
    for entry in entries:
        text = entry.get("text") if isinstance(entry, Mapping) else entry
        start = entry.get("answer_start") if isinstance(entry, Mapping) else None
        start = context.find(str(text)) if start is None else int(start)
        if not isinstance(text, str) or not text or start < 0 or context[start : start + len(text)] != text:
            got = f"{text!r:.60} at {start}" if start >= 0 else f"{text!r:.60}"
            expected, fix = "a part of the passage, and where it begins", "repair the row, or add data.on_invalid=skip"
            raise DataError(f"{location}: an answer does not occur in its passage", got=got, expected=expected, fix=fix)
        answers.append((text, start))
    return PassageQuestion(question=question, context=context, answers=tuple(answers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A question with a part of its passage: special tokens, the question, a separator, the part, special tokens."""

    tokens: list[int]
    passage: tuple[int, int]  # the tokens [first, stop) of the part
    spans: list[tuple[int, int]]  # the characters of these
    target: tuple[int, int]  # first and last token of the answer; (-1, -1) where the part does not hold all of it
    question: int = 0  # its number among those read together


class Windows:
    """Cuts passages into windows of at most `limit` tokens, of which two neighbours share `stride` of the passage."""

    def __init__(self, tokenizer: Tokenizer, limit: int, stride: int) -> None:
        self._tokenizer, self._limit, self._stride = tokenizer, limit, stride
        pair, first, second = tokenizer.encode_prompt("a", "b"), tokenizer.encode("a"), tokenizer.encode("b")
        at = next(each for each in range(len(pair)) if pair[each : each + len(first)] == first)
        then = next(each for each in range(at + len(first), len(pair)) if pair[each : each + len(second)] == second)
        self._head, self._middle, self._tail = pair[:at], pair[at + len(first) : then], pair[then + len(second) :]
        single = tokenizer.encode_prompt("b")
        at = next(each for each in range(len(single)) if single[each : each + len(second)] == second)
        self._around = at, len(single) - at - len(second)
        # A tokenizer without a rule for pairs: a line break, and the end of a text, which stands for no answer.
        self._middle = self._middle or tokenizer.encode("\n")
        self._tail = self._tail or [tokenizer.eos_id]

    def of(self, question: PassageQuestion, location: object) -> list[Window]:
        """The windows of a question. Raises DataError for one that leaves no room for a passage."""
        tokens, spans = self._tokenizer.encode_offsets(question.context)
        before, behind = self._around
        own, spans = (each[before : len(each) - behind] for each in (tokens, spans))  # type: ignore[assignment]
        begin = [*self._head, *self._tokenizer.encode(question.question), *self._middle]
        room = self._limit - len(begin) - len(self._tail)
        if room <= self._stride or not own:
            got, expected = (
                f"{len(begin)} tokens before a passage of {len(own)}",
                "room for more than data.stride tokens",
            )
            fix = "raise data.sequence_length, or lower data.stride"
            raise DataError(f"{location} does not fit into a window", got=got, expected=expected, fix=fix)
        found, first = [], len(begin)
        for start in range(0, max(len(own) - self._stride, 1), room - self._stride):
            part, own_spans = own[start : start + room], spans[start : start + room]
            target = (-1, -1) if not question.answers else _target(own_spans, *question.answers[0])
            found.append(
                Window(
                    tokens=[*begin, *part, *self._tail],
                    passage=(first, first + len(part)),
                    spans=list(own_spans),
                    target=target if target[0] < 0 else (first + target[0], first + target[1]),
                )
            )
        return found


def _target(spans: Sequence[tuple[int, int]], text: str, start: int) -> tuple[int, int]:
    """The first and the last of the tokens with these characters that hold an answer; (-1, -1) if they do not."""
    stop = start + len(text)
    touched = [index for index, (first, last) in enumerate(spans) if first < stop and last > start]
    if not touched or spans[touched[0]][0] > start or spans[touched[-1]][1] < stop:
        return -1, -1
    return touched[0], touched[-1]


def normal_words(text: str) -> list[str]:
    """The words of an answer as SQuAD compares them: in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def answer_scores(predicted: str, answers: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1 of the words, 0 to 1, with the best of the answers (Rajpurkar et al., 2016); none of them, or
    none with words, is the empty answer (Rajpurkar et al., 2018)."""
    golds = [words for each in answers if (words := normal_words(each))] or [[]]
    own = normal_words(predicted)
    return max(float(own == gold) for gold in golds), max(_f1(own, gold) for gold in golds)


def _f1(own: Sequence[str], gold: Sequence[str]) -> float:
    common = (collections.Counter(own) & collections.Counter(gold)).total()
    if not own or not gold:
        return float(own == gold)
    return 2.0 * common / (len(own) + len(gold))
