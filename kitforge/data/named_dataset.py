"""Data sets by name: of the Hugging Face Hub or its cache, and folders of `Dataset.save_to_disk`."""

import os
import re

from kitforge.data.optional_imports import import_optional
from kitforge.foundation.errors import DataError

_SPLIT = re.compile(r"(?P<name>(?:hf://)?[^:]+)(?::(?P<split>\w[^/\\]*))?")
_HUB = re.compile(
    r"(?P<scheme>hf://(?:datasets/)?)?(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?"
)
# What a path that was mistyped may end in.
_FILE = re.compile(r".*\.(txt|jsonl?|[ct]sv|parquet|inter|conll|gz|py|md)")


def load_named(spec: object, *, streaming: bool = False) -> object:
    """The rows that a text names, else what was given.

    `hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT]`, and `OWNER/NAME[@REVISION][:SPLIT]` where there is no such file, go
    through `datasets.load_dataset`, so its cache and HF_HUB_OFFLINE hold; with `streaming` nothing is downloaded ahead.
    `FOLDER[:SPLIT]` is what `save_to_disk` wrote. The split is `train` unless named. Raises DataError where it cannot
    be loaded, in the words of `datasets`.
    """
    if not isinstance(spec, (str, os.PathLike)) or os.path.isfile(spec):
        return spec
    text = os.fspath(spec)
    if text.startswith(("http://", "https://")):
        fix = "download it and name the file; a data set of the Hub is hf://OWNER/NAME"
        raise DataError("an address is not read", got=text, expected="a file, a folder or a pattern", fix=fix)
    whole = _SPLIT.fullmatch(text)
    if whole is None:
        return spec
    name, split = whole["name"], whole["split"] or "train"
    folder = os.path.expanduser(name)
    if any(os.path.isfile(os.path.join(folder, each)) for each in ("dataset_dict.json", "state.json")):
        return _of_folder(folder, whole["split"])
    found = _HUB.fullmatch(name)
    # Without a scheme it is OWNER/NAME, and no path into a folder that is there, nor what looks like a file.
    is_path = name.count("/") != 1 or os.path.exists(name.split("/")[0]) or _FILE.fullmatch(name) is not None
    if found is None or (is_path and not found["scheme"]):
        return spec
    datasets = import_optional("datasets", needed_for="data sets by name", extra="transformers")
    try:
        return datasets.load_dataset(
            found["name"], found["config"], split=split, revision=found["revision"], streaming=streaming
        )
    except Exception as error:  # whatever a connection, a script or a reader raises
        raise DataError(
            f"the data set {found['name']} cannot be loaded",
            got=f"{type(error).__name__}: {error}",
            expected="hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT] of the Hub or its cache; nor is there such a file",
            fix="connect, check the name and its split, or name a file, a folder or a pattern",
        ) from error


def _of_folder(folder: str, split: str | None) -> object:
    datasets = import_optional("datasets", needed_for="folders of save_to_disk", extra="transformers")
    loaded = datasets.load_from_disk(folder)
    if not isinstance(loaded, datasets.DatasetDict):
        if split is None:
            return loaded
        raise DataError(f"{folder} has no splits", got=f":{split}", expected="the folder alone")
    if (split or "train") not in loaded:
        raise DataError(f"{folder} has no split {split or 'train'}", expected=f"{folder}:SPLIT of {', '.join(loaded)}")
    return loaded[split or "train"]
