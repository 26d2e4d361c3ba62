"""A DataLoader as a source: what is taken of it (its rows, batch size, order, collate_fn), and what is said of the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from paragrad.data.generated import Generated
from paragrad.data.source import Items, Order


@dataclass(frozen=True)
class Loaded:
    """What was taken of a DataLoader."""

    source: Items | Generated
    name: str
    batch_size: int | None
    note: str


def of_loader(loader: DataLoader[Any]) -> Loaded:
    """The rows of a DataLoader: read by index where its sampler is one of torch's plain ones, else as it yields them."""
    batches = _plain(loader)
    if batches is None:
        generated = Generated(loader)
        inner = "dataset" if isinstance(loader.dataset, IterableDataset) else type(_sampler(loader)).__name__
        note = f"DataLoader: it is read by one process, in the order of its {inner}"
        if loader.batch_size is not None:
            note += f", and cut into mini-batches of its batch size, {loader.batch_size}"
        return Loaded(generated, generated.what, loader.batch_size, f"{note}.")
    collate = loader.collate_fn or default_collate
    shuffled = isinstance(batches.sampler, RandomSampler)
    taken = [f"batch size {batches.batch_size}", "shuffled by the seed of the run" if shuffled else "not shuffled"]
    taken += ["a short last mini-batch dropped"] * batches.drop_last + ["its collate_fn"] * (collate is not default_collate)
    note = f"DataLoader: {', '.join(taken)}." + " Its num_workers is not used: each worker reads its own rows." * bool(
        loader.num_workers
    )
    items = Items(loader.dataset, collate=collate, order=Order(shuffled, batches.drop_last))
    return Loaded(items, type(loader.dataset).__name__, batches.batch_size, note)


def _plain(loader: DataLoader[Any]) -> BatchSampler | None:
    """What cuts the rows into mini-batches of one size, where each comes once an epoch, all shuffled or in order."""
    data, batches = loader.dataset, loader.batch_sampler
    if isinstance(data, IterableDataset) or type(batches) is not BatchSampler or not hasattr(data, "__len__"):
        return None
    sampler = batches.sampler
    if type(sampler) is RandomSampler:
        return batches if not sampler.replacement and sampler.num_samples == len(data) else None
    return batches if type(sampler) is SequentialSampler else None


def _sampler(loader: DataLoader[Any]) -> Any:
    own = loader.batch_sampler
    return loader.sampler if own is None or type(own) is BatchSampler else own
