"""Entities of chunk tags, such as B-PER and I-PER: counted as seqeval does, and aggregated from the tokens of a text as
Hugging Face's pipeline does. Knows no network.

T tokens, C labels.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

# O, or a chunk tag of one of the schemes BIO, IOE, IOBES and BILOU.
CHUNK_TAG = re.compile(r"O|[BIESLU]-.+")
Aggregation = Literal["none", "simple", "first", "average", "max"]


def entity_counts(wanted: Sequence[str], predicted: Sequence[str]) -> tuple[float, float, float]:
    """Entities of one row that were found, that were predicted, and that there are; an entity is right if its type and
    both of its ends are."""
    theirs, ours = set(_spans(wanted)), set(_spans(predicted))
    return float(len(theirs & ours)), float(len(ours)), float(len(theirs))


def _spans(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Type, first and last index of each entity, of tags in any of the schemes, also inconsistent ones: the rules of
    the CoNLL-2000 evaluation, as in seqeval's default mode."""
    before, start = "O", 0
    for index, tag in enumerate([*tags, "O"]):
        is_same = before[1:] == tag[1:] and before[0] not in "ESLU" and tag[0] not in "BSUO"
        if before != "O" and not is_same:
            yield before[2:], start, index - 1
        start = start if is_same else index
        before = tag


def entity_metrics(right: float, predicted: float, wanted: float) -> dict[str, float]:
    """Precision, recall and F1 of the sums of `entity_counts`; NaN where no entity was predicted and there is none."""
    if predicted + wanted == 0:
        right = math.nan
    precision, recall = right / max(predicted, 1), right / max(wanted, 1)
    return {"precision": precision, "recall": recall, "f1": 2 * right / max(predicted + wanted, 1)}


def entities(
    text: str,
    scores: Tensor,
    spans: Sequence[tuple[int, int]],
    labels: Sequence[Any],
    strategy: Aggregation,
    ignored: Sequence[str],
) -> list[dict[str, Any]]:
    """The labelled tokens of a text, or its entities, without those of the labels `ignored`; `scores` [T, C] are those
    of the tokens at `spans`, which may be more than have scores. See `TokenClassificationPipeline`."""
    found: list[dict[str, Any]] = []
    for index, (row, (start, stop)) in enumerate(zip(scores, spans, strict=False)):
        start += len(text[start:stop]) - len(text[start:stop].lstrip())
        if start < stop:
            found.append({"scores": row, "index": index, "start": start, "end": stop})
    if strategy not in ("none", "simple"):
        words: list[list[dict[str, Any]]] = []
        for token in found:
            is_inside = words and token["start"] > 0 and not text[token["start"] - 1].isspace()
            words[-1].append(token) if is_inside else words.append([token])
        found = []
        for tokens in words:
            # The tokens of a word become one, with scores by the strategy.
            rows = torch.stack([each["scores"] for each in tokens])
            chosen = {"first": rows[0], "average": rows.mean(0), "max": rows[int(rows.max(-1).values.argmax())]}
            found.append({**tokens[0], "scores": chosen[strategy], "end": tokens[-1]["end"]})
    labelled = []
    for each in found:
        best = int(each["scores"].argmax())
        where = {"word": text[each["start"] : each["end"]], "start": each["start"], "end": each["end"]}
        score = float(each["scores"][best])
        labelled.append({"entity": labels[best], "score": score, "index": each["index"], **where})
    named = labelled if strategy == "none" else _groups(labelled, text)
    return [each for each in named if each.get("entity", each.get("entity_group")) not in ignored]


def _groups(labelled: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Neighbours of one type as one entity, unless a B- begins the next; the score is their mean."""
    groups: list[list[dict[str, Any]]] = []
    for each in labelled:
        is_chunk = str(each["entity"])[:2] in ("B-", "I-")
        kind = each["entity"][2:] if is_chunk else each["entity"]
        is_same = groups and groups[-1][0]["kind"] == kind and not str(each["entity"]).startswith("B-")
        groups[-1].append(each | {"kind": kind}) if is_same else groups.append([each | {"kind": kind}])
    return [
        {
            "entity_group": group[0]["kind"],
            "score": sum(each["score"] for each in group) / len(group),
            "word": text[group[0]["start"] : group[-1]["end"]],
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for group in groups
    ]
