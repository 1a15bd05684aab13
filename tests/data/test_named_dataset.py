"""Data sets by name: from the cache of the Hub, from folders of save_to_disk, and what is no name of one."""

import shutil
from pathlib import Path

import datasets
import pytest

from kitforge.data import named_dataset
from kitforge.data.source import SourceConfig, open_rows, open_source, open_stream
from kitforge.data.tables.source import open_table
from kitforge.foundation.errors import DataError

ROWS = {"train": [{"text": "one", "label": 1}, {"text": "two", "label": 2}], "test": [{"text": "three", "label": 3}]}


@pytest.fixture
def splits() -> datasets.DatasetDict:
    return datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in ROWS.items()})


@pytest.fixture
def cached(tmp_path: Path, splits: datasets.DatasetDict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set `owner/rows` in the cache of a machine that is offline, as a download leaves it."""
    for name, split in splits.items():
        split.to_parquet(tmp_path / "rows" / f"{name}-00000-of-00001.parquet")
    cache = tmp_path / "cache"
    datasets.load_dataset(str(tmp_path / "rows"), cache_dir=str(cache))
    (version,) = (cache / "rows").glob("default/*/*/")
    shutil.copytree(version, cache / "owner___rows" / "default" / "0.0.0" / version.name)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("owner/rows", ROWS["train"]),
        ("owner/rows:test", ROWS["test"]),
        ("hf://owner/rows", ROWS["train"]),
        ("hf://datasets/owner/rows/default@main:train[:1]", ROWS["train"][:1]),
    ],
)
def test_a_data_set_of_the_hub_is_read_by_every_door(name: str, wanted: list[dict[str, object]]) -> None:
    assert [row for shard in open_rows(name) for _, row in shard.rows()] == wanted
    texts = [row["text"] for row in wanted]
    assert [text for shard in open_source(name).shards() for text in shard.documents()] == texts
    assert [row for job in open_table(name).jobs(["text", "label"]) for row in job().table.to_pylist()] == wanted


@pytest.mark.usefixtures("cached")
def test_a_stream_is_of_the_library_too() -> None:
    stream = open_stream("owner/rows:test", SourceConfig()).iterable
    assert isinstance(stream, datasets.IterableDataset)
    assert list(stream) == ROWS["test"]


@pytest.mark.usefixtures("cached")
def test_what_cannot_be_loaded_is_said_in_the_words_of_the_library() -> None:
    with pytest.raises(DataError, match=r"the data set owner/others cannot be loaded(.|\n)*OfflineModeIsEnabled"):
        next(iter(open_rows("owner/others")))
    with pytest.raises(DataError, match=r'Unknown split "dev"'):
        open_source("owner/rows:dev")


def test_a_folder_of_save_to_disk_is_read_with_its_splits(tmp_path: Path, splits: datasets.DatasetDict) -> None:
    splits.save_to_disk(str(tmp_path / "all"))
    splits["test"].save_to_disk(str(tmp_path / "one"))
    for name, wanted in ((f"{tmp_path}/all", "train"), (f"{tmp_path}/all:test", "test"), (f"{tmp_path}/one", "test")):
        assert [row for shard in open_rows(name) for _, row in shard.rows()] == ROWS[wanted]
    with pytest.raises(DataError, match="all has no split dev(.|\n)*train, test"):
        named_dataset.load_named(f"{tmp_path}/all:dev")
    with pytest.raises(DataError, match="one has no splits"):
        named_dataset.load_named(f"{tmp_path}/one:dev")


def test_a_path_stays_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "a:b").touch()
    for spec in (
        "data/none",
        "dat/train.jsonl",
        "data/*.csv",
        "a:b",
        "python_stdlib",
        "a/b/c",
        Path("data"),
        None,
        [1],
    ):
        assert named_dataset.load_named(spec) is spec
    with pytest.raises(DataError, match="download it"):
        open_stream("https://example.org/rows.jsonl", SourceConfig())
