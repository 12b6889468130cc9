"""Makes the fixtures of io_test with NumPy's and safetensors' own writers: python3 make.py, with both and ml_dtypes installed.

Element i of every array, in row-major order, is i / 2 - 3 for floating dtypes, 1000 i - 3 for integers, and whether 3 divides i for bool.
"""
import pathlib

import ml_dtypes
import numpy as np
import safetensors.numpy

FOLDER = pathlib.Path(__file__).parent


def array(dtype, *shape):
    i = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    kind = np.dtype(dtype).kind
    values = i / 2 - 3 if kind == "f" else 1000 * i - 3 if kind == "i" else i % 3 == 0
    return np.asarray(values, dtype)


arrays = {
    "f2": array("<f2", 3, 5),
    "f4": array("<f4", 2, 3),
    "f8": array("<f8", 2, 1, 3, 2),
    "i4": array("<i4", 5),
    "i8": array("<i8", 3, 2),
    "b1": array("|b1", 2, 4),
    "u1": array("|b1", 7).astype("|u1") * 2,
    "scalar": array("<f8"),
    "empty": array("<f4", 0, 3),
    "fortran": np.asfortranarray(array("<f4", 2, 3, 4)),
    "fortran4": np.asfortranarray(array("<i8", 2, 1, 3, 2)),
    "big_f2": array(">f2", 2, 2),
    "big_f4": array(">f4", 2, 3),
    "big_f8": np.asfortranarray(array(">f8", 3, 2)),
    "big_i4": array(">i4", 5),
    "big_i8": array(">i8", 2, 2),
    "long": array("<f4", 40, 30),
}
np.savez(FOLDER / "stored.npz", **arrays)
np.savez_compressed(FOLDER / "deflated.npz", **arrays)
np.save(FOLDER / "one.npy", arrays["fortran"])
for version in (2, 3):
    with open(FOLDER / f"version{version}.npy", "wb") as out:
        np.lib.format.write_array(out, arrays["big_f8"], version=(version, 0))

kept = {name: a for name, a in arrays.items() if "fortran" not in name and "big" not in name}
kept["bf16"] = array("<f4", 3, 5).astype(ml_dtypes.bfloat16)  # none of NumPy's own
safetensors.numpy.save_file(kept, FOLDER / "official.safetensors", metadata={"rule": "linear", "scale": "0.5"})
