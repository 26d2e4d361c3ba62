"""DataLoaders as sources: take over rows, batch size, order and collate_fn, and describe the rest in a note."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from paragrad.data.generated import Generated
from paragrad.data.source import Items, Order


def of_loader(loader: DataLoader[Any]) -> tuple[Items | Generated, int | None, str]:
    """Return the rows of a DataLoader, its batch size, and a note.

    Rows are read by index if the sampler is a plain one of torch, else in the order in which the DataLoader yields them.
    """
    batches = _plain(loader)
    if batches is None:
        generated = Generated(loader)
        custom = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
        sampler = type(loader.batch_sampler if custom else loader.sampler).__name__
        inner = "dataset" if isinstance(loader.dataset, IterableDataset) else sampler
        note = f"DataLoader: one process reads it, in the order of its {inner}"
        if loader.batch_size is not None:
            note += f", and cuts it into mini-batches of its batch size, {loader.batch_size}"
        return generated, loader.batch_size, f"{note}."
    collate = loader.collate_fn or default_collate
    shuffled = isinstance(batches.sampler, RandomSampler)
    taken = [f"batch size {batches.batch_size}", "shuffled by the seed of the run" if shuffled else "not shuffled"]
    taken += ["a short last mini-batch dropped"] * batches.drop_last + ["its collate_fn"] * (collate is not default_collate)
    note = f"DataLoader: {', '.join(taken)}."
    if loader.num_workers:
        note += " Its num_workers is not used: each worker reads its own rows."
    items = Items(loader.dataset, collate=collate, order=Order(shuffled, batches.drop_last))
    return items, batches.batch_size, note


def _plain(loader: DataLoader[Any]) -> BatchSampler | None:
    """Return the batch sampler if it yields each row once per epoch, shuffled or in order, in batches of one size."""
    data, batches = loader.dataset, loader.batch_sampler
    if isinstance(data, IterableDataset) or type(batches) is not BatchSampler or not hasattr(data, "__len__"):
        return None
    sampler = batches.sampler
    if type(sampler) is RandomSampler:
        return batches if not sampler.replacement and sampler.num_samples == len(data) else None
    return batches if type(sampler) is SequentialSampler else None
