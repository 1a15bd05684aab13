"""Rows of words and a tag for each: their tokens, and the label of every token."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from kitforge.data.document_shard import column_value
from kitforge.data.labels import label_index
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.errors import DataError
from kitforge.foundation.types import IGNORED

TAG_COLUMNS = ("ner_tags", "tags")  # as the datasets of the Hugging Face Hub call them
# The tag of the word of a token, or None, and whether it is the first token of its word.
TokenTag: TypeAlias = tuple[str | int | None, bool]


def words_of(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[list[int], list[int]]:
    """The tokens of words with one space between them, and the word of each (-1: of none)."""
    tokens, spans = tokenizer.encode_offsets(" ".join(words))
    # A space belongs to no word; a token of two words to the first.
    owners = [owner for number, word in enumerate(words) for owner in (*[number] * len(word), -1)]
    found = [next((each for each in owners[start:stop] if each >= 0), -1) for start, stop in spans]
    for at, (token, (start, stop)) in enumerate(zip(tokens, spans, strict=True)):
        follows = found[at + 1] if at + 1 < len(found) else -1
        # A word that begins with a token of its space alone where it is encoded by itself, as in the vocabularies of
        # LLaMA 2, has that as its first token here too.
        if found[at] < 0 <= follows and start < stop and tokenizer.encode(words[follows])[:1] == [token]:
            found[at] = follows
    return tokens, found


def tagged_tokens(
    row: object, columns: tuple[str, str | None], tokenizer: Tokenizer, location: object
) -> tuple[list[int], list[TokenTag]]:
    """The tokens of the words of a row and the tag of each; `columns` are those of the words and of the tags (None:
    the first of `TAG_COLUMNS` that the row has). Raises DataError for a row without words, with another number of tags,
    or with a word that has no token."""
    present = [name for name in TAG_COLUMNS if isinstance(row, Mapping) and name in row]
    words = column_value(row, columns[0], location, "data.words")
    tags = column_value(row, columns[1] or (*present, *TAG_COLUMNS)[0], location, "data.tags")
    if not (isinstance(words, list) and words and all(isinstance(each, str) and each.strip() for each in words)):
        expected = f"a list of texts in the column {columns[0]!r}"
        raise DataError(f"{location} has no words", got=repr(words)[:80], expected=expected)
    is_list = isinstance(tags, list) and all(isinstance(each, (str, int)) and each != "" for each in tags)
    if not is_list or len(tags) != len(words):
        got = f"{len(tags)} tags" if is_list else repr(tags)[:80]
        raise DataError(f"{location} has other tags than words", got=got, expected=f"{len(words)}, texts or numbers")
    tags = [None if str(each) == str(IGNORED) else each for each in tags]
    tokens, owners = words_of(tokenizer, words)
    if missing := set(range(len(words))) - set(owners):
        got = repr(words[min(missing)])
        raise DataError(f"{location} has a word without tokens", got=got, expected="visible letters in every word")
    firsts = {word: at for at, word in reversed(list(enumerate(owners)))}
    return tokens, [(tags[word] if word >= 0 else None, firsts[word] == at) for at, word in enumerate(owners)]


def token_codes(tags: Sequence[TokenTag], index: Mapping[str, int], location: object, *, labels_all: bool) -> list[int]:
    """Of each token 0 if it has no label, else 1 + 2 label, and one more if it is not the first of its word. Without
    `labels_all` only the first token of a word has one. Raises DataError for an unknown tag."""
    names, found = list(index), list[int]()
    for tag, is_first in tags:
        number = -1 if tag is None else label_index(tag, index, location)
        if not is_first and number >= 0:
            # The entity goes on within a word: I- follows B-.
            number = index.get(re.sub("^B-", "I-", names[number]), number) if labels_all else -1
        found.append(0 if number < 0 else 1 + 2 * number + (not is_first))
    return found
