"""The options of a run shared by all kits."""

from dataclasses import dataclass, field
from typing import Literal

from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.optim.build import OptimizerConfig
from kitforge.core.optim.schedules import ScheduleConfig
from kitforge.core.parallel.config import ParallelConfig
from kitforge.foundation.config import check, check_least
from kitforge.foundation.dtype import ExportDtype, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Length, logging, evaluation, checkpoints and stopping."""

    max_steps: int | None = None  # optimizer steps, including skipped ones; None: by epochs
    epochs: float | None = None  # passes over the data; None: by max_steps
    # samples of a forward pass (gradient accumulation); None: the whole batch of a replica
    micro_batch_size: int | None = None
    max_grad_norm: float = 1.0  # gradient clipping by global norm (a critic has its own); 0: no clipping
    # What of each block the backward pass computes again: selective keeps the results of linear layers, fused attention
    # and reductions over ranks; full keeps nothing. true and false are the former names of full and none.
    activation_checkpointing: Recompute | bool = "none"
    # Where the optimizer is: optimizer: its moments and master weights are in host memory; optimizer_and_gradients:
    # gradients leave for it in the backward pass too, and with precision=bf16 the matrices of blocks stay in bf16.
    offload: Literal["none", "optimizer", "optimizer_and_gradients"] = "none"
    offload_fraction: float = 1.0  # with offload: at most that part of the bytes of all trained parameters
    log_every: int = 1
    eval_every: int | None = None  # steps; None: a tenth of the run, so about ten evaluations
    eval_first: bool = False  # evaluate before the first step too
    eval_batches: int | None = None  # None: the whole evaluation set
    checkpoint_every: int | None = None  # steps; None: only at the end
    save_total_limit: int = 3  # checkpoints to keep; the best one and the parents of incremental ones are kept too
    incremental_checkpoints: int = 0  # incremental checkpoints (changed embedding rows only) between two full ones
    # Metric that selects the best checkpoint; None: the task's: eval/loss, eval/reward of policies, eval/auc of ranking
    # models, eval/hr@k of retrieval models.
    metric_for_best: str | None = None
    metric_for_best_mode: Literal["min", "max"] | None = None  # None: the task's for its own metric, else min
    early_stopping: int | None = None  # patience: evaluations without a new best before the run stops; None: never
    allow_config_changes: bool = False  # resume with changed options, although the continuation is not exact
    allow_data_changes: bool = False  # resume with other data than those of the run
    progress: bool = True
    profile: bool = False  # profile some steps with torch.profiler into profile/, for `kitforge profile`
    profile_steps: tuple[int, ...] = (3, 5)  # the first, which is warm-up, and the last
    # Say before the first step what memory a rank and what time a step will take, which the report compares: true, or a
    # cluster with a speed by its name; true takes configs/cluster/here.yaml if it is there.
    foresee: bool | str = False
    tensorboard: bool = False  # metrics for TensorBoard, into tensorboard/
    wandb: str | None = None  # Weights & Biases project; WANDB_MODE=offline works

    def __post_init__(self) -> None:
        if isinstance(self.activation_checkpointing, bool):
            object.__setattr__(self, "activation_checkpointing", "full" if self.activation_checkpointing else "none")
        counts = ("max_steps", "micro_batch_size", "log_every", "eval_every", "checkpoint_every", "eval_batches")
        check_least("trainer", self, 1, *counts, "save_total_limit", "early_stopping")
        increments = self.incremental_checkpoints
        check(increments >= 0, "trainer.incremental_checkpoints", increments, "0 or more")
        check(self.epochs is None or self.epochs > 0, "trainer.epochs", self.epochs, "a number above 0")
        steps, expected = self.profile_steps, "two steps, the later one last"
        check(len(steps) == 2 and 0 < steps[0] < steps[1], "trainer.profile_steps", steps, expected)
        check(self.max_grad_norm >= 0, "trainer.max_grad_norm", self.max_grad_norm, "a number of at least 0")
        fraction = self.offload_fraction
        check(0 < fraction <= 1, "trainer.offload_fraction", fraction, "a number above 0, at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTrainerOptions(TrainerOptions):
    """Those of a network without embedding tables."""

    incremental_checkpoints: int = field(default=0, init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Top-level options of every task; kits extend them."""

    task: str = "custom"
    seed: int = 0
    output_dir: str | None = None  # None: runs/<time>-<task>-<model>
    overwrite: bool = False  # write into output_dir, or over output, although no such command made what is there
    resume: str | None = None  # auto, a run folder or a step folder
    device: str = "auto"
    precision: Precision = "fp32"
    compile_level: CompileLevel = "O1"
    deterministic: bool = False
    dtype: ExportDtype | None = None  # of exported weights; None: as published
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def num_ranks(self) -> int:
        """Processes of the run: ranks that train, and further ones of a kit."""
        return self.parallel.world_size

    @property
    def summary(self) -> str | None:
        """One line about what several options result in together; None: no line."""
        return None


def check_schedule(options: RunOptions) -> None:
    """Raise ConfigError for options under which a backward pass cannot leave the gradients of weights for later; before
    any rank is started."""
    if options.parallel.stages.splits_backward:
        own = f"with parallel.schedule={options.parallel.schedule}, which has passes for gradients of weights alone"
        fix = "parallel.schedule=interleaved, or 1f1b"
        check(options.compile_level != "O2", "compile_level", options.compile_level, f"O0 or O1 {own}", fix)
        check(options.precision != "fp8", "precision", options.precision, f"fp32, bf16 or fp16 {own}", fix)


def check_copies(options: RunOptions) -> None:
    """Raise ConfigError for options under which slices or passes cannot take turns; before any rank is started."""
    if options.parallel.copies == 1:
        return
    level, offload, size = options.compile_level, options.trainer.offload, options.trainer.micro_batch_size
    expected = "O0 or O1 with parallel.copies=2: compiled blocks would wait for their messages themselves"
    check(level != "O2", "compile_level", level, expected, "compile_level=O1")
    if options.parallel.slices == 1:
        return
    expected = "none or optimizer with parallel.copies=2, whose slices have each gradient only in sum"
    check(offload != "optimizer_and_gradients", "trainer.offload", offload, expected, "trainer.offload=optimizer")
    expected = "2 or more with parallel.copies=2, which cuts each micro-batch into two slices"
    check(size != 1, "trainer.micro_batch_size", size, expected, "trainer.micro_batch_size=2")


def check_offload(options: RunOptions) -> None:
    """Raise ConfigError for options that the optimizer cannot have on the host; before any rank is started."""
    mode, fix = options.trainer.offload, "trainer.offload=none"
    if mode == "none":
        return
    name, level, precision = options.optimizer.name, options.compile_level, options.precision
    check(name != "muon", "optimizer.name", name, "adamw or sgd with trainer.offload, which has no Muon", fix)
    check(level != "O2", "compile_level", level, "O0 or O1 with trainer.offload: blocks wait for their weights", fix)
    if mode == "optimizer_and_gradients":
        expected = "fp32 or bf16, since gradients leave before the loss scale is known to be good"
        check(precision in ("fp32", "bf16"), "precision", precision, expected, "trainer.offload=optimizer")
        degrees, schedule = options.parallel, options.parallel.schedule
        expected = "1f1b or interleaved beside data or context, whose sums would miss gradients that come later"
        are_late = degrees.stages.splits_backward and degrees.shard == 1 and degrees.data * degrees.context > 1
        check(not are_late, "parallel.schedule", schedule, expected, "trainer.offload=optimizer")
