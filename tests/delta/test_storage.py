"""Vectors stored in fewer bits: how far they may be off, and that nothing but the rounding is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.rounding import largest_error, rounded
from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.places import open_place
from torchrec_ext.delta.storage import LARGEST, decode, encode
from torchrec_ext.delta.storage import rounded as stored

FLOAT32_MAX = float(np.finfo(np.float32).max)
ROUNDED = ("float16", "int8")
DIMS = (1, 2, 3, 4, 7, 8, 16, 33)


@st.composite
def matrices(draw: st.DrawFn, largest: float, dims: tuple[int, ...] = DIMS) -> np.ndarray:
    """Rows of every scale: constants, zeros, denormals, large values, and ranges far from the values."""
    shape = draw(st.integers(1, 4)), draw(st.sampled_from(dims))
    bound = np.float32(min(largest, FLOAT32_MAX))
    values = st.floats(-float(bound), float(bound), width=32)
    scaled = st.builds(
        lambda unit, scale, shift: np.float32(np.clip(unit * 10.0**scale + shift, -bound, bound)),
        st.floats(-1, 1, width=32),
        st.integers(-45, 4),
        st.sampled_from([0.0, 0.0, 1.0, -1000.0]),
    )
    fill = st.sampled_from([0.0, -0.0, 1.0, 1e-45, 6e-8]).map(np.float32)
    return draw(hnp.arrays(np.float32, shape, elements=draw(st.sampled_from([values, scaled])), fill=fill))


@pytest.mark.parametrize("storage_dtype", ROUNDED)
def test_no_value_is_off_by_more_than_the_bound_that_is_documented(storage_dtype: str) -> None:
    @settings(max_examples=400, deadline=None)
    @given(matrices(LARGEST[storage_dtype]))
    def every_matrix(vectors: np.ndarray) -> None:
        found = stored(vectors, storage_dtype)
        assert np.isfinite(found).all()
        error = np.abs(found.astype(np.float64) - vectors.astype(np.float64))
        assert (error <= largest_error(vectors, storage_dtype)).all()

    every_matrix()


@pytest.mark.parametrize("storage_dtype", ROUNDED)
def test_vectors_are_rounded_as_the_formula_says_bit_for_bit(storage_dtype: str) -> None:
    @settings(max_examples=200, deadline=None)
    @given(matrices(LARGEST[storage_dtype]))
    def every_matrix(vectors: np.ndarray) -> None:
        expected = rounded(vectors, storage_dtype)
        assert stored(vectors, storage_dtype).view(np.int32).tolist() == expected.view(np.int32).tolist()

    every_matrix()


def test_fbgemm_reads_int8_rows() -> None:
    vectors = np.random.default_rng(0).standard_normal((50, 19)).astype(np.float32)
    rows = torch.from_numpy(encode(vectors, "int8"))
    found = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(rows).numpy()
    # It may multiply and add in one operation.
    assert np.abs(found - stored(vectors, "int8")).max() <= 2.0**-22


@pytest.mark.parametrize("storage_dtype", ROUNDED)
@given(value=st.floats(-60_000, 60_000, width=16))
def test_constant_rows_of_values_that_float16_has_are_exact(storage_dtype: str, value: float) -> None:
    vectors = np.full((2, 5), value, np.float32)
    assert stored(vectors, storage_dtype).tolist() == vectors.tolist()


@given(matrices(LARGEST["int8"], dims=(1,)))
def test_int8_rows_of_one_column_are_exact(vectors: np.ndarray) -> None:
    assert stored(vectors, "int8").tolist() == vectors.tolist()


@pytest.mark.parametrize("storage_dtype", ["float32", *ROUNDED])
@pytest.mark.parametrize("dim", [1, 2, 3, 64])
@pytest.mark.parametrize("rows", [0, 1, 5000])
def test_files_say_how_their_vectors_are_stored(
    tmp_path: Path, storage_dtype: str, dim: int, rows: int
) -> None:
    vectors = np.random.default_rng(0).standard_normal((rows, dim)).astype(np.float32)
    file = open_place(tmp_path).create(".", "part")
    with fmt.ParquetFileWriter(file, fmt.part_schema(storage_dtype)) as writer:
        for op, some in ((fmt.UPSERT, vectors), (fmt.DELETE, None)):
            writer.write(
                fmt.part_batch(
                    global_step=1,
                    rank=0,
                    world_size=1,
                    feature_name="f",
                    table_fqn="t",
                    source="zch",
                    op=op,
                    keys=np.arange(rows),
                    vectors=some,
                    storage_dtype=storage_dtype,
                )
            )
    with pq.ParquetFile(tmp_path / "part") as file:
        assert fmt.storage_of(file) == storage_dtype
        found = fmt.vectors_of(file.read()["embedding"].chunks, dim)
    assert found.view(np.int32).tolist() == rounded(vectors, storage_dtype).view(np.int32).tolist()


def test_values_of_another_length_or_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="2 vectors of dimension 3 hold 21 values of uint8, not 22"):
        decode(np.zeros(21, np.uint8), 2, 3)
    with pytest.raises(ValueError, match="stored as float64"):
        decode(np.zeros(6), 2, 3)
