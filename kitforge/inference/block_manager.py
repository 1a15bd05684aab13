"""Who owns which block of the cache. Knows numbers only; the keys and values are in `cached_attention.KeyValueCache`.

A block holds `block_size` positions of every layer. Blocks are counted by reference: texts that begin alike may share
their first ones, and one that is shared is copied before it is written to. A full block that nobody refers to stays
readable under the digest of the whole text up to its end, until its room is needed.

Each running text has a lane, a stretch of the cache where it is at home. Its blocks are taken from there as long as
they are free, so that they usually follow one another and can be read without being gathered.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import final

from kitforge.inference.sequence import Sequence


@final
class BlockManager:
    """Hands out blocks 0 .. num_blocks - 1 to at most `num_lanes` sequences at a time.

    With `is_contiguous` a shared prefix is copied to the sequence's own lane where that is free, instead of being
    shared. `copies` maps each block that must be written before the next forward pass to the block that it is a copy
    of; all sources are read before any is written.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_lanes: int, *, is_contiguous: bool, keeps_prefixes: bool
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.copies: dict[int, int] = {}
        self._is_contiguous = is_contiguous
        self._keeps_prefixes = keeps_prefixes
        self._lane_blocks = max(1, num_blocks // num_lanes)
        self._lanes = dict.fromkeys(range(num_lanes))  # those that are free, longest unused first
        self._references = [0] * num_blocks
        self._empty = dict.fromkeys(range(num_blocks))
        self._kept: dict[int, bytes] = {}  # unreferenced but readable, longest unused first
        self._digests: list[bytes | None] = [None] * num_blocks
        self._blocks_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to."""
        return len(self._empty) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Of these, the ones that a text with the same beginning could read."""
        return len(self._kept)

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """How many blocks the sequence lacks for its next `num_tokens` positions."""
        table, first = sequence.blocks, sequence.num_cached // self.block_size
        shared = sum(self._references[block] > 1 for block in table[first:])
        return max(0, self._count(sequence.num_cached + num_tokens) - len(table)) + shared

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence a lane and the blocks of the longest known beginning of its text."""
        # What is taken from the cache is not read, so it has no logits.
        known = self._known(sequence) if self._keeps_prefixes and not sequence.scores_prompt else []
        lane = self._lane_of(known)
        sequence.lane = next(iter(self._lanes)) if lane is None else lane
        del self._lanes[sequence.lane]
        self._attach(sequence, known, is_at_home=lane is not None)
        # At least the last token is read again, since its logits are wanted.
        sequence.num_cached = min(len(known) * self.block_size, len(sequence.tokens) - 1)
        del sequence.digests[sequence.num_cached // self.block_size :]

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the next `num_tokens` positions writable; False, and nothing done, where blocks are lacking."""
        if self.missing(sequence, num_tokens) > self.num_free:
            return False
        table = sequence.blocks
        for place in range(sequence.num_cached // self.block_size, len(table)):
            if self._references[table[place]] > 1:
                own = self._take(self._home(sequence, place))
                self.copies[own] = table[place]
                self._drop(table[place])
                table[place] = own
                sequence.is_consecutive = _is_consecutive(table)
        for place in range(len(table), self._count(sequence.num_cached + num_tokens)):
            self._append(sequence, self._take(self._home(sequence, place)))
        return True

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """So many more positions have been written for good; blocks that became full can be found from now on."""
        sequence.num_cached += num_tokens
        if not self._keeps_prefixes:
            return
        while (len(sequence.digests) + 1) * self.block_size <= sequence.num_cached:
            digest = self._next_digest(sequence)
            block = sequence.blocks[len(sequence.digests)]
            sequence.digests.append(digest)
            if digest not in self._blocks_of:
                self._blocks_of[digest] = block
                self._digests[block] = digest

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let a child without blocks go on from the prompt that its parent has read; False where there is no lane.

        The last token of the prompt is left for it to read again, since it has its own to choose after it.
        """
        if not self._lanes:
            return False
        child.lane = next(iter(self._lanes))
        del self._lanes[child.lane]
        child.num_cached = child.prompt_length - 1
        child.digests = parent.digests[: child.num_cached // self.block_size]
        self._attach(child, parent.blocks[: self._count(child.num_cached)], is_at_home=False)
        return True

    def release(self, sequence: Sequence) -> None:
        """Take everything back. The end of a text is reused before its beginning, which others may share."""
        for block in reversed(sequence.blocks):
            self._drop(block)
        sequence.blocks, sequence.digests = [], []
        sequence.num_cached, sequence.is_consecutive = 0, True
        if sequence.lane is not None:
            self._lanes[sequence.lane] = None
            sequence.lane = None

    def forget(self) -> None:
        """Let no text be found any more, since the weights that it was read with have changed."""
        self._empty |= dict.fromkeys(self._kept)
        self._kept = {}
        self._blocks_of = {}
        self._digests = [None] * self.num_blocks

    def _count(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def _known(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known beginning."""
        found: list[int] = []
        while (len(found) + 1) * self.block_size <= len(sequence.tokens):
            digest = self._next_digest(sequence)
            if digest not in self._blocks_of:
                break
            found.append(self._blocks_of[digest])
            sequence.digests.append(digest)
        return found

    def _next_digest(self, sequence: Sequence) -> bytes:
        place = len(sequence.digests)
        before = sequence.digests[-1] if sequence.digests else sequence.root
        tokens = array("q", sequence.tokens[place * self.block_size : (place + 1) * self.block_size])
        return blake2b(before + tokens.tobytes(), digest_size=16).digest()

    def _lane_of(self, known: list[int]) -> int | None:
        """The free lane in which exactly these blocks lie, if there is one and nobody reads them."""
        if not known or any(self._references[block] for block in known) or not _is_consecutive(known):
            return None
        lane, place = divmod(known[0], self._lane_blocks)
        return lane if place == 0 and lane in self._lanes else None

    def _attach(self, sequence: Sequence, blocks: list[int], *, is_at_home: bool) -> None:
        """Fill the empty table of a sequence with blocks that others may hold: shared, or as copies at home."""
        homes = [self._home(sequence, place) for place in range(len(blocks))]
        free = all(home in self._empty or home in self._kept for home in homes)
        if self._is_contiguous and not is_at_home and free and not set(homes) & set(blocks):
            for home, block in zip(homes, blocks, strict=True):
                self._append(sequence, self._take(home))
                self.copies[home] = block
            return
        for block in blocks:
            self._share(block)
            self._append(sequence, block)

    def _append(self, sequence: Sequence, block: int) -> None:
        table = sequence.blocks
        sequence.is_consecutive = sequence.is_consecutive and (not table or block == table[-1] + 1)
        table.append(block)

    def _home(self, sequence: Sequence, place: int) -> int:
        assert sequence.lane is not None
        return sequence.lane * self._lane_blocks + place

    def _take(self, wanted: int) -> int:
        """A free block, the wanted one if possible, else one whose loss is felt least."""
        if wanted not in self._empty and wanted not in self._kept:
            wanted = next(iter(self._empty or self._kept))
        self._empty.pop(wanted, None)
        digest = self._kept.pop(wanted, None)
        if digest is not None:
            del self._blocks_of[digest]
            self._digests[wanted] = None
        self._references[wanted] = 1
        return wanted

    def _share(self, block: int) -> None:
        self._kept.pop(block, None)
        self._references[block] += 1

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        self.copies.pop(block, None)
        digest = self._digests[block]
        if digest is None:
            self._empty[block] = None
        else:
            self._kept[block] = digest


def _is_consecutive(blocks: list[int]) -> bool:
    return blocks == list(range(blocks[0], blocks[0] + len(blocks)))
