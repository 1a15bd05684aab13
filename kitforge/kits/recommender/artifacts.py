"""Artifacts of a run beside its checkpoints: features.json and items.safetensors.

The features of a run never change. Where a run goes on over rows with other items, its later checkpoints have items of
their own, items_after_STEP.safetensors, and the earlier ones keep theirs.
"""

import filecmp
from functools import partial
from pathlib import Path

from kitforge.core.checkpoint.load import Checkpoint, newest, open_checkpoint
from kitforge.core.checkpoint.manifest import MANIFEST
from kitforge.foundation.errors import DataError
from kitforge.kits.recommender.features import FeatureEncoder, load_features, save_features
from kitforge.kits.recommender.item_catalog import ItemCatalog, load_item_catalog, save_item_catalog
from kitforge.kits.recommender.schema import schema_summary
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from kitforge.trainer.options import RunOptions

FEATURES = "features.json"
ITEMS = "items.safetensors"
_LATER_ITEMS = "items_after_"


class SaveFeatures(Callback):
    """Writes features.json when the run starts, and items.safetensors for retrieval families; logs what the columns
    are, the features of the network, hash collisions, and in `unlearned` which values have no rows of their own."""

    def __init__(
        self, encoder: FeatureEncoder, catalogue: ItemCatalog | None, used: str, unlearned: str | None = None
    ) -> None:
        self._encoder = encoder
        self._used = used
        self._catalogue = catalogue
        self._unlearned = unlearned

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "step" and run.state.cursor.step == 1:
            run.log_event("schema", "; ".join(schema_summary(self._encoder.schema)))
            run.log_event("features", self._used)
        if event.kind == "step" and run.state.cursor.step == 1 and (words := self._encoder.statistics.collisions()):
            run.log_event("collisions", words)
        if event.kind == "step" and self._unlearned:
            run.log_event("unlearned", self._unlearned)
            self._unlearned = None
        if event.kind == "start" and run.folder is not None and run.world.rank == 0:
            if run.state.cursor.step == 0 or not (run.folder / FEATURES).is_file():
                save_features(run.folder / FEATURES, self._encoder.schema, self._encoder.statistics)
            if self._catalogue is not None:
                _save_items(run.folder, self._catalogue, run.state.cursor.step)


def _save_items(folder: Path, catalogue: ItemCatalog, step: int) -> None:
    """The items of the checkpoints after `step`; those up to it keep theirs."""
    for path in folder.glob(f"{_LATER_ITEMS}*.safetensors"):
        if _step_of(path) >= step:
            # Of a history that this run replaces.
            path.unlink()
    known = _items_before(folder, step + 1)
    path = folder / (f"{_LATER_ITEMS}{step}.safetensors" if step and known.is_file() else ITEMS)
    save_item_catalog(path, catalogue)
    if path != known and filecmp.cmp(path, known, shallow=False):
        path.unlink()


def _items_before(folder: Path, step: int) -> Path:
    """The newest file of items in a run folder for a checkpoint of that step."""
    earlier = [path for path in folder.glob(f"{_LATER_ITEMS}*.safetensors") if _step_of(path) < step]
    return max(earlier, key=_step_of, default=folder / ITEMS)


def _step_of(path: Path) -> int:
    """The step after which a file of items holds."""
    return int(path.stem.removeprefix(_LATER_ITEMS))


def find_features(folder: Path) -> FeatureEncoder:
    """The features of a run folder or a step folder."""
    candidates = (folder / FEATURES, folder.resolve().parent.parent / FEATURES)
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise DataError("there are no features", got=folder, expected=f"a run of the recommender, with its {FEATURES}")
    return FeatureEncoder(*load_features(path))


def resumed_checkpoint(options: RunOptions) -> Checkpoint | None:
    """The newest checkpoint that a resumed run goes on from, unverified; None for a new run."""
    named = options.output_dir if options.resume == "auto" else options.resume
    if named is None or (Path(named) / MANIFEST).is_file():
        return None if named is None else open_checkpoint(Path(named), verify=False)
    root, opened = Path(named) / "checkpoints", partial(open_checkpoint, verify=False)
    # A damaged one is told of when the run resumes.
    return newest(root, on_damaged=lambda _error: None, opened=opened)


def find_item_catalog(checkpoint: Checkpoint) -> ItemCatalog | None:
    """The items of a checkpoint; None if the run is not a retrieval run."""
    path = checkpoint.folder / ITEMS
    if not path.is_file():
        path = _items_before(checkpoint.folder.resolve().parent.parent, checkpoint.step)
    return load_item_catalog(path) if path.is_file() else None
