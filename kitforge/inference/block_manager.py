"""Allocation of KV cache blocks: reference counts, prefix caching, copy on write. Keys and values themselves are in
`paged_attention.KeyValueCache`.

A block holds `block_size` positions of every layer. Sequences with a common prefix share its blocks; a shared block is
copied before it is written. A full block that nobody references stays in the prefix cache, under the hash of all tokens
up to its end, until it is evicted.

Each running sequence prefers one region of the cache. Its blocks come from there while they are free, so they are
usually consecutive and can be read without a gather.
"""

from array import array
from hashlib import blake2b

from kitforge.inference.sequence import Sequence


class BlockManager:
    """Allocates blocks 0 .. num_blocks - 1 to at most `num_regions` sequences at a time.

    With `is_contiguous` a cached prefix is copied into the sequence's own region where that is free, instead of being
    shared. `copies` maps each block that must be written before the next forward pass to its source; all sources are
    read before any block is written.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_regions: int, *, is_contiguous: bool, has_prefix_cache: bool
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.copies: dict[int, int] = {}
        self._is_contiguous = is_contiguous
        self._has_prefix_cache = has_prefix_cache
        self._region_blocks = max(1, num_blocks // num_regions)
        self._free_regions = dict.fromkeys(range(num_regions))  # least recently used first
        self._ref_counts = [0] * num_blocks
        self._empty = dict.fromkeys(range(num_blocks))
        self._evictable: dict[int, bytes] = {}  # unreferenced but cached, least recently used first
        self._block_hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without a reference."""
        return len(self._empty) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Free blocks that are still in the prefix cache."""
        return len(self._evictable)

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to allocate for the next `num_tokens` positions of the sequence."""
        table, first = sequence.block_table, sequence.num_cached // self.block_size
        shared = sum(self._ref_counts[block] > 1 for block in table[first:])
        return max(0, -(-(sequence.num_cached + num_tokens) // self.block_size) - len(table)) + shared

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence a region and the blocks of its longest cached prefix."""
        # Cached tokens skip the forward pass, so they have no logits.
        known = self._cached_prefix(sequence) if self._has_prefix_cache and not sequence.needs_all_outputs else []
        region = self._region_of(known)
        sequence.cache_region = next(iter(self._free_regions)) if region is None else region
        del self._free_regions[sequence.cache_region]
        self._attach(sequence, known, is_in_region=region is not None)
        # At least the last token is computed, since its logits are needed.
        sequence.num_cached = min(len(known) * self.block_size, len(sequence.tokens) - 1)
        del sequence.block_hashes[sequence.num_cached // self.block_size :]

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the next `num_tokens` positions writable; False, without a change, where blocks are missing."""
        table, first = sequence.block_table, sequence.num_cached // self.block_size
        num_blocks = -(-(sequence.num_cached + num_tokens) // self.block_size)
        if first + 1 == num_blocks == len(table) and self._ref_counts[table[first]] == 1:
            # As in most steps of decoding: its last block has room.
            return True
        if self.num_missing(sequence, num_tokens) > self.num_free:
            return False
        for index in range(first, len(table)):
            if self._ref_counts[table[index]] > 1:
                own = self._allocate(self._preferred_block(sequence, index))
                self.copies[own] = table[index]
                self._remove_reference(table[index])
                table[index] = own
                sequence.is_consecutive = table == list(range(table[0], table[0] + len(table)))
        for index in range(len(table), num_blocks):
            self._append(sequence, self._allocate(self._preferred_block(sequence, index)))
        return True

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Commit `num_tokens` written positions; blocks that are full now enter the prefix cache."""
        sequence.num_cached += num_tokens
        if not self._has_prefix_cache:
            return
        while (len(sequence.block_hashes) + 1) * self.block_size <= sequence.num_cached:
            block_hash = self._next_block_hash(sequence)
            block = sequence.block_table[len(sequence.block_hashes)]
            sequence.block_hashes.append(block_hash)
            if block_hash not in self._block_by_hash:
                self._block_by_hash[block_hash] = block
                self._block_hashes[block] = block_hash

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Share the prompt's blocks of the parent with a child that has none; False where no region is free.

        The child computes the last token of the prompt again, since it samples its own next token.
        """
        if not self._free_regions:
            return False
        child.cache_region = next(iter(self._free_regions))
        del self._free_regions[child.cache_region]
        child.num_cached = child.prompt_length - 1
        child.block_hashes = parent.block_hashes[: child.num_cached // self.block_size]
        num_blocks = -(-child.num_cached // self.block_size)
        self._attach(child, parent.block_table[:num_blocks], is_in_region=False)
        return True

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence. Its last blocks are evicted before its first, which others may share."""
        for block in reversed(sequence.block_table):
            self._remove_reference(block)
        sequence.block_table, sequence.block_hashes = [], []
        sequence.num_cached, sequence.is_consecutive = 0, True
        if sequence.cache_region is not None:
            self._free_regions[sequence.cache_region] = None
            sequence.cache_region = None

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, as after a change of weights."""
        self._empty |= dict.fromkeys(self._evictable)
        self._evictable = {}
        self._block_by_hash = {}
        self._block_hashes = [None] * self.num_blocks

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        blocks: list[int] = []
        while (len(blocks) + 1) * self.block_size <= len(sequence.tokens):
            block_hash = self._next_block_hash(sequence)
            if block_hash not in self._block_by_hash:
                break
            blocks.append(self._block_by_hash[block_hash])
            sequence.block_hashes.append(block_hash)
        return blocks

    def _next_block_hash(self, sequence: Sequence) -> bytes:
        index = len(sequence.block_hashes)
        before = sequence.block_hashes[-1] if sequence.block_hashes else sequence.cache_salt
        tokens = array("q", sequence.tokens[index * self.block_size : (index + 1) * self.block_size])
        return blake2b(before + tokens.tobytes(), digest_size=16).digest()

    def _region_of(self, known: list[int]) -> int | None:
        """The free region that begins with these blocks, if no sequence references them."""
        if not known or any(self._ref_counts[block] for block in known):
            return None
        if known != list(range(known[0], known[0] + len(known))):
            return None
        region, offset = divmod(known[0], self._region_blocks)
        return region if offset == 0 and region in self._free_regions else None

    def _attach(self, sequence: Sequence, blocks: list[int], *, is_in_region: bool) -> None:
        """Fill the empty block table of a sequence with cached blocks: shared, or copied into its own region."""
        preferred = [self._preferred_block(sequence, index) for index in range(len(blocks))]
        free = all(home in self._empty or home in self._evictable for home in preferred)
        if self._is_contiguous and not is_in_region and free and not set(preferred) & set(blocks):
            for home, block in zip(preferred, blocks, strict=True):
                self._append(sequence, self._allocate(home))
                self.copies[home] = block
            return
        for block in blocks:
            self._evictable.pop(block, None)
            self._ref_counts[block] += 1
            self._append(sequence, block)

    def _append(self, sequence: Sequence, block: int) -> None:
        table = sequence.block_table
        sequence.is_consecutive = sequence.is_consecutive and (not table or block == table[-1] + 1)
        table.append(block)

    def _preferred_block(self, sequence: Sequence, index: int) -> int:
        assert sequence.cache_region is not None
        return sequence.cache_region * self._region_blocks + index

    def _allocate(self, preferred: int) -> int:
        """A free block: the preferred one if possible, else an empty one, else the least recently used cached one."""
        if preferred not in self._empty and preferred not in self._evictable:
            preferred = next(iter(self._empty or self._evictable))
        self._empty.pop(preferred, None)
        block_hash = self._evictable.pop(preferred, None)
        if block_hash is not None:
            del self._block_by_hash[block_hash]
            self._block_hashes[preferred] = None
        self._ref_counts[preferred] = 1
        return preferred

    def _remove_reference(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        self.copies.pop(block, None)
        block_hash = self._block_hashes[block]
        if block_hash is None:
            self._empty[block] = None
        else:
            self._evictable[block] = block_hash
