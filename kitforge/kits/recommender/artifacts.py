"""Artifacts of a run beside its checkpoints: features.json and items.safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import final

from kitforge.foundation.errors import DataError
from kitforge.kits.recommender.features import FeatureEncoder, load_features, save_features
from kitforge.kits.recommender.item_catalog import ItemCatalog, load_item_catalog, save_item_catalog
from kitforge.kits.recommender.schema import schema_summary
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from kitforge.trainer.options import RunOptions

FEATURES = "features.json"
ITEMS = "items.safetensors"


@final
class SaveFeatures(Callback):
    """Writes features.json when the run starts, and items.safetensors for retrieval families; logs what the columns
    are, the features of the network, and hash collisions."""

    def __init__(self, encoder: FeatureEncoder, catalogue: ItemCatalog | None, used: str) -> None:
        self._encoder = encoder
        self._used = used
        self._catalogue = catalogue

    def on_event(self, event: Event, run: RunContext) -> None:
        """Save at the start; log at the first step, when the other logs are open."""
        if event.kind == "step" and run.state.cursor.step == 1:
            run.log_event("schema", "; ".join(schema_summary(self._encoder.schema)))
            run.log_event("features", self._used)
        if event.kind == "step" and run.state.cursor.step == 1 and (words := self._encoder.statistics.collisions()):
            run.log_event("collisions", words)
        if event.kind == "start" and run.folder is not None and run.world.rank == 0:
            save_features(run.folder / FEATURES, self._encoder.schema, self._encoder.statistics)
            if self._catalogue is not None:
                save_item_catalog(run.folder / ITEMS, self._catalogue)


def find_features(folder: Path) -> FeatureEncoder:
    """The features of a run folder or a step folder."""
    path = _find_artifact(folder, FEATURES)
    if path is None:
        raise DataError("there are no features", got=folder, expected=f"a run of the recommender, with its {FEATURES}")
    return FeatureEncoder(*load_features(path))


def resumed_features(options: RunOptions) -> FeatureEncoder | None:
    """The features of a resumed run; None for a new run."""
    run_folder = options.output_dir if options.resume == "auto" else options.resume
    path = None if run_folder is None else _find_artifact(Path(run_folder), FEATURES)
    return None if path is None else FeatureEncoder(*load_features(path))


def find_item_catalog(folder: Path) -> ItemCatalog | None:
    """The items of a run folder or a step folder; None if the run is not a retrieval run."""
    path = _find_artifact(folder, ITEMS)
    return None if path is None else load_item_catalog(path)


def _find_artifact(folder: Path, name: str) -> Path | None:
    """A file of the run; a step folder is RUN/checkpoints/STEP."""
    candidates = (folder / name, folder.resolve().parent.parent / name)
    return next((path for path in candidates if path.is_file()), None)
