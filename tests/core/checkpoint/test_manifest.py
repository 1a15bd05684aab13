"""One entry a tensor: any grid of slices is told, found again and checked, at the cost of its layout alone."""

import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from kitforge.core.checkpoint.manifest import FORMAT_VERSION, FileEntry, Manifest, Slice, read_manifest, write_manifest
from kitforge.core.checkpoint.regions import by_name, entry_of
from kitforge.foundation.errors import CheckpointError
from kitforge.foundation.types import Region


def grid(name: str, shape: tuple[int, ...], starts: tuple[tuple[int, ...], ...]) -> list[Slice]:
    """The slices that begin there, each in a file of its own."""
    sizes = [
        dict(zip(each, map(int.__sub__, (*each[1:], size), each), strict=True))
        for each, size in zip(starts, shape, strict=True)
    ]
    return [
        Slice(
            name=name,
            dtype="F32",
            global_shape=shape,
            offset=offset,
            shape=tuple(size[begin] for size, begin in zip(sizes, offset, strict=True)),
            file=f"model-r{number:05}-00001.safetensors",
        )
        for number, offset in enumerate(itertools.product(*starts))
    ]


def manifest(*tensors: list[Slice]) -> Manifest:
    files = sorted({each.file for slices in tensors for each in slices})
    return Manifest(
        format_version=FORMAT_VERSION,
        package_version="0",
        kind="training",
        step=1,
        model=tuple(entry_of(Path("here"), slices) for slices in tensors),
        optimizer=(),
        files=tuple(FileEntry(name=file, bytes=1, crc32="0") for file in files),
    )


GRIDS = [
    ((), ()),
    ((5,), ((0,),)),
    ((5,), ((0, 2, 4),)),
    ((7, 6), ((0, 3, 6), (0, 2))),
    ((4, 3, 2), ((0, 1, 2, 3), (0,), (0, 1))),
    ((0, 4), ((0,), (0,))),
]


@pytest.mark.parametrize(("shape", "starts"), GRIDS)
def test_a_grid_comes_back_slice_by_slice(
    tmp_path: Path, shape: tuple[int, ...], starts: tuple[tuple[int, ...], ...]
) -> None:
    slices = grid("weight", shape, starts)
    shuffled = random.Random(0).sample(slices, len(slices))
    write_manifest(tmp_path, manifest(shuffled))
    (entry,) = read_manifest(tmp_path).model
    assert list(entry.slices()) == slices


@pytest.mark.parametrize(("shape", "starts"), GRIDS)
def test_a_part_names_just_the_slices_that_it_overlaps(
    shape: tuple[int, ...], starts: tuple[tuple[int, ...], ...]
) -> None:
    slices = grid("weight", shape, starts)
    entry = entry_of(Path("here"), slices)
    bounds = [list(itertools.combinations(range(size + 1), 2)) for size in shape]
    for box in itertools.product(*bounds):
        part = Region(
            global_shape=shape,
            offset=tuple(begin for begin, _ in box),
            shape=tuple(end - begin for begin, end in box),
        )
        expected = [
            each
            for each in slices
            if all(
                begin < first + size and first < end
                for (begin, end), first, size in zip(box, each.offset, each.shape, strict=True)
            )
        ]
        assert list(entry.slices(part)) == expected


BAD: dict[str, list[Slice]] = {
    "only a part": grid("weight", (7, 6), ((0, 3), (0, 2)))[:3],
    "lie in no grid": [
        *grid("weight", (4, 4), ((0, 2), (0, 2)))[:2],
        Slice(name="weight", dtype="F32", global_shape=(4, 4), offset=(2, 0), shape=(2, 4), file="b"),
    ],
    "elements that are in": grid("weight", (5,), ((0, 2, 4),))
    + [Slice(name="weight", dtype="F32", global_shape=(5,), offset=(1,), shape=(2,), file="b")],
    "slices that differ": grid("weight", (5,), ((0, 2, 4),))[:2]
    + [Slice(name="weight", dtype="BF16", global_shape=(5,), offset=(4,), shape=(1,), file="b")],
}


@pytest.mark.parametrize("words", BAD)
def test_slices_that_are_no_tensor_are_refused_when_they_are_written(words: str) -> None:
    with pytest.raises(CheckpointError, match=f"tensor 'weight' in here do not make up the tensor(.|\n)*{words}"):
        entry_of(Path("here"), BAD[words])


# A path to a value of a manifest, and what to put there.
DAMAGE: list[tuple[tuple[Any, ...], Any]] = [
    (("model", 0, "shape"), [7.0, 6]),
    (("model", 0, "shape"), [7]),
    (("model", 0, "shape"), [-7, 6]),
    (("model", 0, "layout"), 9),
    (("model", 0, "layout"), True),
    (("model", 0, "name"), 3),
    (("model", 0, "offset"), [0, 0]),
    (("model", 0, "alias_of"), None),
    (("model", 0), []),
    (("model",), None),
    (("layouts", 0, "starts"), [[0, 3], [0, 2]]),
    (("layouts", 0, "starts"), [[0, 3, 3], [0, 2]]),
    (("layouts", 0, "starts"), [[1, 3, 6], [0, 2]]),
    (("layouts", 0, "starts"), [[0, 3, 7], [0, 2]]),
    (("layouts", 0, "files", 0), 6),
    (("layouts", 0, "files", 0), "model-r00000-00001.safetensors"),
    (("layouts", 0, "file"), 0),
    (("layouts",), {}),
    (("files", 0, "bytes"), "1"),
    (("files", 0, "name"), None),
    (("files",), 5),
    (("step",), "one"),
]


@pytest.mark.parametrize(("path", "value"), DAMAGE, ids=str)
def test_a_signed_manifest_of_another_shape_is_refused_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: tuple[Any, ...], value: Any
) -> None:
    write_manifest(tmp_path, manifest(grid("weight", (7, 6), ((0, 3, 6), (0, 2)))))
    values = json.loads((tmp_path / "manifest.json").read_text())
    monkeypatch.setattr("kitforge.core.checkpoint.manifest._signature", lambda _: values["sha256"])
    place = values
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_a_tensor_cannot_be_told_twice(tmp_path: Path) -> None:
    slices = grid("weight", (5,), ((0, 2, 4),))
    write_manifest(tmp_path, manifest(slices, slices))
    with pytest.raises(CheckpointError, match="two entries for the tensor 'weight'"):
        read_manifest(tmp_path)


def test_what_many_ranks_have_cut_alike_costs_no_more_than_what_one_has_written(tmp_path: Path) -> None:
    """Slices of the size that a model of 80 layers has over 64 ranks: bytes, and work, do not grow with them."""
    tensors = []
    for number in range(200):
        size = 640
        tensors.append(grid(f"blocks.{number}.weight", (size, 8), (tuple(range(0, size, 10)), (0,))))
    assert sum(map(len, tensors)) == 12_800
    write_manifest(tmp_path, manifest(*tensors))
    assert (tmp_path / "manifest.json").stat().st_size < 200 * len(tensors)
    started = time.process_time()
    found = read_manifest(tmp_path)
    # Once it took 200 us a slice: 2.5 s.
    assert time.process_time() - started < 0.6
    assert by_name(each for entry in found.model for each in entry.slices()).keys() == {
        f"blocks.{number}.weight" for number in range(200)
    }
