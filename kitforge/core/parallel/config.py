"""The parallel degrees of a run."""

import math
from dataclasses import dataclass
from typing import Literal

from kitforge.core.parallel.schedules import Pipeline, ScheduleName
from kitforge.foundation.config import check, check_least
from kitforge.foundation.errors import ConfigError

# Outermost first: the ranks of an inner axis are neighbours, as they communicate most.
AXES = ("pipeline", "data", "shard", "context", "tensor")
# Axes whose ranks compute every pass of a network together, each with a part of its weights or of the rows.
MODEL_AXES = ("tensor", "context", "pipeline", "expert")
# Chunks of each row on a rank of `context_by=keys`.
CHUNKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism: world = data x shard x tensor x context x pipeline."""

    data: int = 1  # data parallel (DDP): replicas of the model, each with a part of every batch
    shard: int = 1  # fully sharded data parallel (FSDP, ZeRO): shards of the state, each with a part of every batch
    tensor: int = 1  # tensor parallel: shards of every matrix, all with the same batch
    context: int = 1  # context parallel: shards of every row
    # heads: attention exchanges shards of rows for shards of its heads; keys: it gathers the keys and values of rows
    context_by: Literal["heads", "keys"] = "heads"
    pipeline: int = 1  # pipeline parallel: stages of whole blocks, through which micro-batches pass one after another
    expert: int = 1  # expert parallel: the experts of a block, divided among ranks of data x shard x context
    schedule: ScheduleName = "1f1b"  # with pipeline: the order of passes: 1f1b, interleaved, zero_bubble, zero_bubble_v
    stages_per_rank: int = 2  # with schedule=interleaved: stages on each rank of pipeline
    sequence_parallel: bool = True  # with tensor: norms, dropout and residuals are sharded along the sequence
    zero_stage: Literal[1, 2, 3] = 3  # with shard: 1 shards optimizer state, 2 also gradients, 3 also weights
    # 2: micro-batches are cut into two slices, or with pipeline a backward pass runs beside a forward pass of another
    # one: both take turns, so that one computes while the other communicates
    copies: Literal[1, 2] = 1
    timeout: float = 600.0  # seconds that a rank waits in a collective before the run fails
    restarts: int = 0  # restarts of local ranks that died, with resume=auto

    def __post_init__(self) -> None:
        check_least("parallel", self, 1, *AXES, "expert")
        batch, degree = self.data * self.shard * self.context, self.expert
        check(
            batch % degree == 0,
            "parallel.expert",
            degree,
            f"a divisor of data x shard x context = {self.data} x {self.shard} x {self.context} = {batch}, whose ranks "
            f"it divides: {batch} / {degree} = {batch / degree:.2f}",
            f"parallel.data={degree}",
        )
        check(self.timeout > 0, "parallel.timeout", self.timeout, "a number of seconds above 0")
        check_least("parallel", self, 0, "restarts")
        exchange, expected = self.context_by, "heads with parallel.context=1, which has whole rows"
        check(exchange == "heads" or self.context > 1, "parallel.context_by", exchange, expected, "parallel.context=2")
        schedule, chunks = self.schedule, self.stages_per_rank
        expected = "1f1b with parallel.pipeline=1, which has no stages"
        check(schedule == "1f1b" or self.pipeline > 1, "parallel.schedule", schedule, expected, "parallel.pipeline=2")
        if schedule == "interleaved":
            check(chunks > 1, "parallel.stages_per_rank", chunks, "2 or more", "parallel.schedule=1f1b has one")
        else:
            expected = f"2, the default, with parallel.schedule={schedule}, whose number of stages is its own"
            check(chunks == 2, "parallel.stages_per_rank", chunks, expected, "parallel.schedule=interleaved")
        if self.stages.splits_backward and self.shard > 1:
            expected = f"1 or 2 with parallel.schedule={schedule}, whose weight gradients come after 3 frees weights"
            check(self.zero_stage < 3, "parallel.zero_stage", self.zero_stage, expected, "parallel.zero_stage=2")
        if self.copies > 1:
            talks, keeps = max(self.tensor, self.context, self.expert), self.shard == 1 or self.zero_stage < 3
            least = "1 without parallel.tensor, context or expert above 1"
            expected = f"{least}: without their messages there is none to hide"
            fix = "parallel.tensor=2 beside it, or parallel.copies=1"
            check(talks > 1, "parallel.copies", self.copies, expected, fix)
            expected = "1 or 2 with parallel.copies=2, as 3 frees weights that the other pass reads"
            check(keeps, "parallel.zero_stage", self.zero_stage, expected, "parallel.zero_stage=2")

    @property
    def slices(self) -> int:
        """Into how many slices `copies` cuts a micro-batch: none with pipeline, whose micro-batches take turns."""
        return self.copies if self.pipeline == 1 else 1

    @property
    def stages(self) -> Pipeline:
        """The stages of `pipeline`."""
        chunks = {"interleaved": self.stages_per_rank, "zero_bubble_v": 2}.get(self.schedule, 1)
        return Pipeline(self.pipeline, self.schedule, chunks)

    @property
    def world_size(self) -> int:
        """Ranks of these degrees."""
        return self.data * self.shard * self.tensor * self.context * self.pipeline

    @property
    def num_replicas(self) -> int:
        """Ranks with different samples of a batch."""
        return self.data * self.shard

    def shard_length(self, length: int) -> int:
        """The tokens of one rank of `context` in rows of that length, which are padded so that the axes cut them."""
        parts = self.tensor if self.sequence_parallel else 1
        parts = math.lcm(parts, CHUNKS) if self.context_by == "keys" else parts
        return -(-length // (self.context * parts)) * parts

    def describe(self) -> str:
        """The arithmetic, for messages: `shard=2 x tensor=2 = 4`."""
        split = [f"{name}={getattr(self, name)}" for name in AXES if getattr(self, name) > 1]
        return f"{' x '.join(split) or 'no axis split'} = {self.world_size}"

    def check_world(self, size: int, num_ranks: int | None = None) -> None:
        """Raise ConfigError unless `num_ranks`, by default what the degrees multiply to, were started."""
        if size == (num_ranks or self.world_size):
            return
        if num_ranks is not None and num_ranks > self.world_size:
            raise ConfigError(
                f"the run expects {self.world_size} training and {num_ranks - self.world_size} inference ranks",
                got=f"{size} ranks, of which {self.describe()} train",
                fix=f"start {num_ranks} ranks, or change parallel.* and role_ranks.*",
            )
        raise ConfigError(
            "the degrees of parallelism do not multiply to the number of ranks",
            got=f"{self.describe()} of {size} ranks",
            expected="data x shard x tensor x context x pipeline to be the number of ranks",
            fix=f"start {self.world_size} ranks, or change parallel.* (for example parallel.shard={size})",
        )
