"""The options of a run that every kit shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.optim.build import OptimizerConfig
from kitforge.core.optim.schedules import ScheduleConfig
from kitforge.core.parallel.config import ParallelConfig
from kitforge.foundation.config import check
from kitforge.foundation.dtype import ExportDtype, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """How long to train, how often to look, and when to stop."""

    max_steps: int | None = None  # optimizer steps, skipped ones included; None: from epochs
    epochs: float | None = None  # passes over the data; None: from max_steps
    micro_batch_size: int | None = None  # samples of one forward pass; None: the whole batch
    max_grad_norm: float = 1.0  # largest global norm of the gradients, of a policy without its critic's; 0: no clipping
    activation_checkpointing: bool = (
        False  # keep no activations within a block, compute them again in the backward pass
    )
    log_every: int = 1
    eval_every: int | None = None  # steps; None: at the end only
    eval_first: bool = False  # also before the first step
    eval_batches: int | None = None  # None: the whole evaluation set
    checkpoint_every: int | None = None  # steps; None: at the end only
    save_total_limit: int = 3  # the last ones; the best is kept besides, and what these build on
    incremental_checkpoints: int = 0  # after each whole one, so many that hold only those rows of tables that changed
    # Which metric says what is best; None: the task's own, which is eval/loss, a policy's eval/reward, eval/auc of
    # recommenders that score rows, or eval/hr@k of those that find items.
    metric_for_best: str | None = None
    metric_for_best_mode: Literal["min", "max"] | None = None  # None: that of the task's own metric, min for any other
    early_stopping: int | None = None  # evaluations without a new best before the run stops; None: never
    max_consecutive_skips: int = 25  # non-finite steps in a row before the run gives up or rolls back
    rollback: bool = False  # go back to the last checkpoint's weights instead of giving up
    max_rollbacks: int = 10  # in the whole run, before it gives up all the same
    allow_config_changes: bool = False  # resume although changed options make an exact continuation impossible
    allow_data_changes: bool = False  # resume although the data are others than those that the run began with
    progress: bool = True
    profile: bool = False  # trace steps 3 to 5 and write profile/
    wandb: str | None = None  # project to log to; works offline with WANDB_MODE=offline

    def __post_init__(self) -> None:
        for name in ("max_steps", "micro_batch_size", "log_every", "eval_every", "checkpoint_every"):
            value = getattr(self, name)
            check(value is None or value > 0, f"trainer.{name}", value, "a whole number of at least 1")
        for name in (
            "eval_batches",
            "save_total_limit",
            "early_stopping",
            "max_consecutive_skips",
            "max_rollbacks",
        ):
            value = getattr(self, name)
            check(value is None or value > 0, f"trainer.{name}", value, "a whole number of at least 1")
        check(
            self.incremental_checkpoints >= 0,
            "trainer.incremental_checkpoints",
            self.incremental_checkpoints,
            "0 or more",
        )
        check(self.epochs is None or self.epochs > 0, "trainer.epochs", self.epochs, "a number above 0")
        check(self.max_grad_norm >= 0, "trainer.max_grad_norm", self.max_grad_norm, "a number of at least 0")
        if self.early_stopping is not None:
            regular = self.eval_every is not None
            check(regular, "trainer.early_stopping", self.early_stopping, "trainer.eval_every beside it")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options at the top level of every task; a kit's own options extend them."""

    # Sections that count only once the run is trained. Not a field.
    INFERENCE_ONLY_SECTIONS = tuple[str, ...]()

    task: str = "custom"
    seed: int = 0
    output_dir: str | None = None  # None: runs/<time>-<task>-<model>
    resume: str | None = None  # auto, a run folder or a step folder
    device: str = "auto"
    precision: Precision = "fp32"
    compile_level: CompileLevel = "O1"
    deterministic: bool = False
    dtype: ExportDtype | None = None  # of the weights that `export` writes; None: what they were published in
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def num_ranks(self) -> int:
        """Processes of the run: those that train and, where a kit knows others, those beside them."""
        return self.parallel.world_size

    @property
    def summary(self) -> str | None:
        """What several options come to together, in a line to show; None where each speaks for itself."""
        return None
