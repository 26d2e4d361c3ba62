"""Optional libraries, and the commands that install them."""

from __future__ import annotations

EXTRAS: dict[str, tuple[str, ...]] = {
    "plot": ("matplotlib>=3.8",),
    "keras": ("keras>=3.9",),
    "parquet": ("pyarrow>=17",),
    "hdf5": ("h5py>=3.11",),
    "root": ("uproot>=5.6", "awkward>=2.6"),
    "network": ("pyarrow>=17", "cryptography>=42"),
}
"""Requirements of each extra, the same as in pyproject.toml."""
EXTRAS["files"] = EXTRAS["parquet"] + EXTRAS["hdf5"] + EXTRAS["root"]
USES = {
    "plot": "pictures: paragrad plot, analyse --figures",
    "keras": "Keras models, pg.fit",
    "parquet": "CSV and Parquet files",
    "hdf5": "HDF5 files",
    "root": "ROOT files",
    "network": "workers on other machines: paragrad serve, join",
    "files": "all kinds of files",
}
"""Features that need each extra."""


def command(extra: str) -> str:
    """Return the command that installs an extra; it names the libraries, so that it works for any installation of paragrad."""
    return "pip install " + " ".join(f"'{requirement}'" for requirement in EXTRAS[extra])
