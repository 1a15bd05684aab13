"""The loss mask of the first rows, as text."""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice

from kitforge.data.chat.datasets import PreferencePair, PromptExample, TokenizedExample, UnpairedExample
from kitforge.data.text.continuation import decode_continuation
from kitforge.data.tokenizers.loading import HuggingFaceTokenizer, Tokenizer

INSPECTED_ROWS = 3


def loss_mask_lines(
    rows: Iterator[TokenizedExample | PreferencePair | UnpairedExample | PromptExample], tokenizer: Tokenizer
) -> Iterator[str]:
    """The first rows as lines: spans inside and outside of the loss mask, with visible special tokens and line
    breaks."""
    for number, row in enumerate(islice(rows, INSPECTED_ROWS), start=1):
        for name, example in _examples(row).items():
            yield f"row {number}{name}: {len(example.tokens)} tokens, {sum(example.loss_mask)} trained"
            runs = groupby(zip(example.loss_mask, example.tokens, strict=True), key=lambda each: each[0])
            before: list[int] = []
            for is_trained, run in runs:
                tokens = [token for _, token in run]
                text = visible_text(tokens, tokenizer, before)
                before += tokens
                yield f"  {'trained' if is_trained else 'context'} {text!r}"


def visible_text(tokens: Sequence[int], tokenizer: Tokenizer, before: Sequence[int] = ()) -> str:
    """The text of tokens after those `before`, special tokens included; those without text in the vocabulary are shown
    as `<eos>`."""
    named = {"pad": tokenizer.pad_id, "bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    special = {
        token: f"<{name}>" for name, token in named.items() if token is not None and not tokenizer.token_bytes(token)
    }
    if isinstance(tokenizer, HuggingFaceTokenizer):
        special |= {token: text for text, token in tokenizer.special_tokens.items()}
    text, passed = "", list(before)
    for is_special, run in groupby(tokens, key=lambda token: token in special):
        part = list(run)
        spelled = (special[token] for token in part)
        text += "".join(spelled) if is_special else decode_continuation(tokenizer, passed, part)
        passed += part
    return text


def _examples(row: TokenizedExample | PreferencePair | UnpairedExample | PromptExample) -> dict[str, TokenizedExample]:
    if isinstance(row, PreferencePair):
        return {", chosen": row.chosen, ", rejected": row.rejected}
    if isinstance(row, UnpairedExample):
        return {", desirable" if row.is_desirable else ", undesirable": row.completion}
    if isinstance(row, PromptExample):
        return {", prompt": TokenizedExample(tokens=row.tokens, loss_mask=(False,) * len(row.tokens))}
    return {"": row}
