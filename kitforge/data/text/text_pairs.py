"""Rows of texts that belong together, and of texts that do not."""

from collections.abc import Mapping

from kitforge.data.document_shard import column_value, document_of
from kitforge.foundation.errors import DataError

NEGATIVE = "negative"  # the column of negatives unless another is named


def pair_texts(row: object, columns: tuple[str, str, str | None], location: object) -> list[str]:
    """The anchor, its positive and its negatives; `columns` are theirs. Without a column of negatives the one called
    "negative" is read where a row has it. Raises DataError for a text that is missing or empty, and for a positive or
    negative that cannot be told from the anchor or the positive."""
    anchor, positive, negative = columns
    texts = [document_of(row, anchor, "strict", location, "data.anchor")]
    texts.append(document_of(row, positive, "strict", location, "data.positive"))
    if negative is not None or (isinstance(row, Mapping) and row.get(NEGATIVE) is not None):
        found = column_value(row, negative or NEGATIVE, location, "data.negative")
        for each in found if isinstance(found, list) else [found]:
            texts.append(document_of(each, negative or NEGATIVE, "strict", location, "data.negative"))
    if not all(text.strip() for text in texts):
        raise DataError(f"{location} is not a pair", got="an empty text", expected="an anchor and a positive")
    if texts[0] == texts[1] or texts[1] in texts[2:] or texts[0] in texts[2:]:
        got = f"{texts[0] if texts[0] in texts[1:] else texts[1]!r:.60} twice"
        raise DataError(f"{location} compares a text with itself", got=got, expected="texts that differ")
    return texts
