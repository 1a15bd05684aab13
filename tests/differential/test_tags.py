"""Labels and tags as transformers' examples make them, and their metrics as seqeval and scikit-learn count them."""

import math
from functools import cache
from typing import Any, cast

import datasets
import numpy as np
import pytest
import seqeval.metrics
import seqeval.scheme
import sklearn.metrics
import tokenizers
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from seqeval.metrics.v1 import precision_recall_fscore_support

from kitforge.data.tokenizers.huggingface import HuggingFaceTokenizer
from kitforge.kits.transformers.entities import entity_counts, entity_metrics
from kitforge.kits.transformers.rows import metrics_of
from kitforge.kits.transformers.token_classification import TokenClassificationOptions, TokenDataOptions, read_tagged
from tests.differential.drawn import drawn
from tests.tokenizer_kinds import tokenizer_of

SCHEMES = {
    "BIO": ("BI", seqeval.scheme.IOB2),
    "IOBES": ("BIES", seqeval.scheme.IOBES),
    "BILOU": ("BILU", seqeval.scheme.BILOU),
}
TYPES = ("PER", "LOC")
NAMES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
PAD = -100


def tags_of(scheme: str) -> st.SearchStrategy[str]:
    return st.sampled_from(["O", *(f"{letter}-{kind}" for letter in SCHEMES[scheme][0] for kind in TYPES)])


@st.composite
def sound_tags(draw: Any, scheme: str, length: int) -> list[str]:
    """Tags of spans, as the scheme spells them."""
    first, inside, last, alone = list({"BIO": "BIIB", "IOBES": "BIES", "BILOU": "BILU"}[scheme])
    found: list[str] = []
    while len(found) < length:
        size, kind = draw(st.integers(0, min(3, length - len(found)))), draw(st.sampled_from(TYPES))
        letters = [first, *[inside] * (size - 2), last] if size > 1 else [alone] * size
        found += [f"{letter}-{kind}" for letter in letters] or ["O"]
    return found


@st.composite
def drawn_tags(draw: Any, *, sound: bool) -> tuple[str, list[list[str]], list[list[str]]]:
    """A scheme and tags of rows, wanted and predicted, of which most are equal."""
    scheme, wanted, predicted = draw(st.sampled_from([*SCHEMES])), [], []
    for length in draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)):
        tags = sound_tags(scheme, length) if sound else st.lists(tags_of(scheme), min_size=length, max_size=length)
        wanted.append(draw(tags))
        predicted.append(draw(st.one_of(st.just(wanted[-1]), tags)))
    return scheme, wanted, predicted


def ours(wanted: list[list[str]], predicted: list[list[str]]) -> dict[str, float]:
    """Our metrics, with seqeval's 0 where there is no entity at all: ours is NaN there, which is never the best."""
    counts = [sum(each) for each in zip(*map(entity_counts, wanted, predicted), strict=True)]
    found = entity_metrics(*counts)
    if any(counts):
        return found
    assert all(map(math.isnan, found.values()))
    return dict.fromkeys(found, 0.0)


@drawn(60)
@given(drawn_tags(sound=True))
def test_entities_of_sound_tags_are_those_of_seqeval_in_strict_mode(case: Any) -> None:
    scheme, wanted, predicted = case
    report: Any = precision_recall_fscore_support(
        wanted, predicted, average="micro", scheme=SCHEMES[scheme][1], zero_division=0
    )
    assert list(ours(wanted, predicted).values()) == pytest.approx([float(each) for each in report[:3]])


@drawn(60)
@given(drawn_tags(sound=False))
@example(("BILOU", [["B-A", "U-A"]], [["U-A", "U-A"]]))
def test_entities_of_any_tags_are_those_of_seqeval_by_default(case: Any) -> None:
    scheme, wanted, predicted = case
    if scheme == "BILOU":
        # The default mode does not know U and L.
        letters = str.maketrans({"U": "S", "L": "E"})
        spelt = [[[tag[0].translate(letters) + tag[1:] for tag in row] for row in rows] for rows in (wanted, predicted)]
    else:
        spelt = [wanted, predicted]
    names = ("precision", "recall", "f1")
    scores = [getattr(seqeval.metrics, f"{name}_score")(*spelt, zero_division=0) for name in names]
    assert [ours(wanted, predicted)[name] for name in names] == pytest.approx(scores)


@drawn(40)
@given(
    st.integers(2, 4).flatmap(
        lambda size: st.tuples(st.just(size), st.lists(st.tuples(*[st.integers(0, size - 1)] * 2), min_size=1))
    )
)
def test_plain_classes_are_counted_as_by_scikit_learn(case: tuple[int, list[tuple[int, int]]]) -> None:
    size, pairs = case
    wanted, predicted = np.array(pairs).T
    confusion = torch.zeros(size, size, dtype=torch.float64)
    for each in zip(wanted, predicted, strict=True):
        confusion[each] += 1
    found = metrics_of(torch.zeros(()), confusion)
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(wanted, predicted))
    assert found["f1"] == pytest.approx(sklearn.metrics.f1_score(wanted, predicted, average="macro", zero_division=0))


# Kinds of tokenizers that encode the words of a text as transformers encodes each of them alone.
KINDS = ("prepend and strip", "metaspace always", "byte-level with prefix", "words")
WORD = st.text(alphabet="ahelo(2.é😀", min_size=1, max_size=4)


@cache
def theirs(kind: str) -> transformers.PreTrainedTokenizerFast:
    ours = cast(HuggingFaceTokenizer, tokenizer_of(kind))
    pieces = tokenizers.Tokenizer.from_buffer(ours.files["tokenizer.json"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, pad_token="</s>")


def aligned(kind: str, row: Any, names: list[str], *, labels_all: bool) -> dict[str, Any]:
    """`tokenize_and_align_labels` of transformers' run_ner."""
    encoded: Any = theirs(kind)(row["tokens"], is_split_into_words=True)
    inside = [names.index(each.replace("B-", "I-")) for each in names]
    labels, previous = [], None
    for word in encoded.word_ids():
        tag = PAD if word is None else row["ner_tags"][word]
        if word is not None and word == previous and tag != PAD:
            tag = inside[tag] if labels_all else PAD
        labels.append(tag)
        previous = word
    return {"input_ids": encoded["input_ids"], "labels": labels}


@drawn(40)
@given(
    st.sampled_from(KINDS),
    st.permutations(NAMES),
    st.lists(
        st.lists(st.tuples(WORD, st.sampled_from([PAD, *range(5)])), min_size=1, max_size=5), min_size=1, max_size=3
    ),
    st.booleans(),
)
def test_tags_lie_on_the_tokens_that_run_ner_puts_them_on(
    kind: str, names: Any, drawn_rows: Any, labels_all: bool
) -> None:
    tag = datasets.ClassLabel(names=list(names))
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(tag)})
    found = [{"tokens": [word for word, _ in row], "ner_tags": [tag for _, tag in row]} for row in drawn_rows]
    rows = datasets.Dataset.from_list(found, features=features)
    pad = transformers.DataCollatorForTokenClassification(theirs(kind))
    wanted = pad([aligned(kind, row, list(names), labels_all=labels_all) for row in rows])
    options = TokenClassificationOptions(data=TokenDataOptions(label_all_tokens=labels_all, eval_fraction=0.0))
    # A checkpoint with the same names in another order.
    data = read_tagged(rows, None, tokenizer_of(kind), options, NAMES)
    batch = data.train.batch(np.arange(len(rows)))
    assert batch["tokens"].tolist() == wanted["input_ids"].tolist()
    numbers = torch.tensor([*(NAMES.index(name) for name in names), PAD])
    assert (
        batch["labels"].clamp(min=PAD).where(batch["labels"] >= 0, PAD).tolist()
        == numbers[wanted["labels"].where(wanted["labels"] >= 0, 5)].tolist()
    )
