"""The header of a GGUF file, whole and damaged, and the values of every type of tensor."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.data import gguf_file
from kitforge.data.gguf_file import GgufFile, is_gguf
from kitforge.foundation.errors import ModelError

KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
ROWS, COLUMNS = 3, 512


def write(path: Path, kind: str = "F32") -> Path:
    """A file with two tensors of that type, with random bits in its blocks."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 7)
    writer.add_float32("llama.scale", 0.5)
    writer.add_bool("llama.flag", True)
    writer.add_array("words", ["a", "naïve", ""])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("nested", [[1, 2], [3]])
    number = getattr(gguf.GGMLQuantizationType, kind)
    elements, size = gguf.GGML_QUANT_SIZES[number]
    draw = np.random.default_rng(3)
    for name in ("first", "second"):
        data = draw.integers(0, 120, (ROWS, COLUMNS // elements * size), dtype=np.uint8)
        writer.add_tensor(name, data, raw_dtype=number)
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_package_gguf(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", kind)
    file = GgufFile(path)
    for theirs in gguf.GGUFReader(str(path)).tensors:
        wanted = gguf.quants.dequantize(theirs.data, theirs.tensor_type).reshape(theirs.shape.tolist()[::-1])
        ours = file.values(theirs.name)
        if kind == "BF16" and theirs.name != "vector":
            ours = (ours.astype(np.uint32) << 16).view(np.float32)
        assert ours.shape == wanted.shape
        assert np.array_equal(ours.astype(np.float32), wanted.astype(np.float32), equal_nan=True)


def test_every_type_has_the_blocks_of_the_package_gguf() -> None:
    for number, (name, elements, size) in gguf_file._TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, elements, size)


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    metadata = GgufFile(write(tmp_path / "a.gguf")).metadata
    assert metadata["general.architecture"] == "llama"
    assert (metadata["llama.block_count"], metadata["llama.scale"], metadata["llama.flag"]) == (7, 0.5, True)
    assert metadata["words"] == ["a", "naïve", ""]
    assert metadata["numbers"] == [1, -2, 3]
    assert metadata["nested"] == [[1, 2], [3]]


@given(st.floats(0, 1))
def test_a_file_that_is_cut_off_anywhere_is_refused(share: float) -> None:
    whole = WHOLE
    end = int(share * (len(whole) - 33))  # the padding behind the last tensor may be missing
    path = FOLDER / "cut.gguf"
    path.write_bytes(whole[:end])
    with pytest.raises(ModelError, match=r"cut\.gguf (is cut off|is not a GGUF|cannot be read)"):
        GgufFile(path)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_header_with_a_wrong_byte_is_read_or_refused(position: int, value: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[position] = value
    path = FOLDER / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        GgufFile(path)
    except ModelError as error:
        assert "damaged.gguf" in str(error)


def test_a_type_of_tensor_that_is_unknown_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "IQ4_NL")
    with pytest.raises(ModelError, match=r"(?s)'first' has an unknown type.*20"):
        GgufFile(path)


def test_another_file_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04" + bytes(50))
    with pytest.raises(ModelError, match="not a GGUF"):
        GgufFile(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(50))
    with pytest.raises(ModelError, match="version 1"):
        GgufFile(tmp_path / "b.gguf")
    assert is_gguf(tmp_path / "a.gguf")
    assert not is_gguf(tmp_path / "c.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        GgufFile(tmp_path / "c.gguf")


@pytest.fixture(autouse=True, scope="module")
def _whole_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FOLDER, WHOLE
    FOLDER = tmp_path_factory.mktemp("gguf")
    WHOLE = write(FOLDER / "a.gguf").read_bytes()


FOLDER, WHOLE = Path(), b""
