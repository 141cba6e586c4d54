# SPDX-License-Identifier: Apache-2.0
"""How many examples a batch holds, from its structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from numbers import Number
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_MOST_FIELDS = 8
"""A list of more tensors than this is hardly a list of the fields of one batch."""

_MOST_CHANNELS = 4
"""A tensor with three dimensions may be an image if its first one is at most this."""

_TEXT_OR_NUMBER = (int, float, str, bytes)
"""The types of most values in nested lists (polygons, tokens). They contain no tensors."""

_WITHOUT_A_SIZE = (*_TEXT_OR_NUMBER, Tensor, PackedSequence, type(None), type)
"""Types that say nothing of the size of a batch but by their first dimension."""

_WITH_NOTHING_WITHIN = {int, float, str, bytes, bool, type(None)}

_ONE_DIFFERS = "The tensors of a batch differ in their first dimension."


class Count(NamedTuple):
    """How many examples a batch holds."""

    examples: int | None
    """None if there is nothing to count."""
    doubt: str | None = None
    """Why the number may be wrong, in whole sentences; None if there is no doubt."""
    withheld: bool = False
    """Whether the number is as likely wrong as right: a run should not begin with it."""


class _Part(NamedTuple):
    """A tensor of a batch, or an object that is counted like a tensor."""

    size: int
    """The first dimension, or the number of packed sequences, or of graphs."""
    shape: tuple[int, ...]
    """Shape after the first dimension."""


def examples_in(batch: Any) -> Count:
    """Count the examples in a batch by its structure. Reads shapes, never values.

    1. The number of examples in a tensor is its first dimension. In a PackedSequence it is the
       number of sequences. In an object with `num_graphs` (PyTorch Geometric) it is the number of
       graphs.
    2. Mappings, dataclasses, named tuples, lists and tuples are records of fields. The number of
       examples is the first dimension that their tensors share.
    3. The number of examples in a list is its length if it is plainly a list of examples. This is a
       list of tensors with equally many dimensions that differ in the first one. (A few tensors may
       also be fields: then the number is in doubt.) It is also a list of records, as detection
       models take them. And it is one of several lists of the same length, each with one kind of
       elements, as `tuple(zip(*batch))` makes them. (A list of tuples, one for each example, has
       the same elements in another order.)

    Scalars, text, None and numbers have no first dimension and are not counted.

    If the tensors of a record differ in their first dimension, the first tensor decides if most
    tensors agree with it. Else an object in the batch decides by its `num_graphs` or `batch_size`,
    or a dataclass by its length if a tensor has this first dimension (chemprop's graphs of
    molecules do). Else the number is that of the first tensor, and it is withheld if other
    numbers are more frequent: of images and their boxes, either may be the examples.

    Args:
        batch: A batch of a data loader.

    Returns:
        The number, with a doubt if the structure allows for another number.

    Examples:
        >>> import torch
        >>> examples_in([torch.zeros(16, 8), torch.zeros(16, 8)])
        Count(examples=16, doubt=None, withheld=False)
        >>> examples_in([torch.zeros(length) for length in range(5, 15)])
        Count(examples=10, doubt=None, withheld=False)
        >>> images, targets = [torch.zeros(3, 8, 9)] * 2, [{"boxes": torch.zeros(5, 4)}] * 2
        >>> examples_in((tuple(images), tuple(targets)))
        Count(examples=2, doubt=None, withheld=False)
    """
    if (size := _size(batch)) is not None:
        return Count(size)
    if _is_list(batch) and batch and all(_is_record(x) for x in batch) and _is_uniform(batch):
        return _count_records(batch)
    top = list(_fields(batch))
    lists = [field for field in top if _is_list(field) and field]
    parts = [part for field in top if not _is_list(field) for part in _parts(field)]
    if not lists:
        return _count_tensors(batch, parts)
    if parts:
        return _size_of_tensors(batch, parts, lists)
    if len(lists) == 1:
        return examples_in(lists[0])
    return _count_lists(lists, alone=len(lists) == len(top) and _is_list(batch))


def rows_in(
    batch: Any, counted: float | None, count: Callable[[Any], Count] = examples_in
) -> int | None:
    """Return how many rows a batch has; None if its structure does not say.

    Args:
        batch: The batch.
        counted: What a user's function counts in it, if that may be the rows. It is where the
            structure leaves a doubt, and allows this number too.
        count: Counts by structure.
    """
    try:
        found = count(batch)
        if found.doubt and counted in _possible_sizes(batch):
            return int(counted)
        return found.examples
    except Exception:  # containers that users make themselves may raise anything
        return None


def first_dimensions(batch: Any) -> list[int]:
    """Return the first dimension of each tensor in a batch, in order."""
    return [part.size for part in _parts(batch)]


def examples_of_loaders(iterables: Any, batch: Any) -> Count:
    """Count the examples of a step that takes one batch from each of several data loaders.

    All batches contribute to the loss; their weights in it are not known. If all batches hold the
    same number of examples, that is the result. If the numbers differ, the result is the number in
    the first batch, in doubt. Loaders that have run out (None) are not counted.

    Args:
        iterables: The loaders, in a mapping or a sequence.
        batch: One batch of each loader, in the same structure. A batch with another structure is
            counted as the batch of one loader.

    Examples:
        >>> import torch
        >>> loaders = {"a": object(), "b": object()}
        >>> examples_of_loaders(loaders, {"a": torch.zeros(16, 8), "b": torch.zeros(16, 3)})
        Count(examples=16, doubt=None, withheld=False)
    """
    batches = _batch_of_each(iterables, batch)
    if batches is None or len(batches) < 2:
        return examples_in(batch)
    counts = [count for count in map(examples_in, batches) if count.examples is not None]
    if len({count.examples for count in counts}) < 2:
        return next((c for c in counts if c.doubt), counts[0] if counts else Count(None))
    sizes = ", ".join(str(count.examples) for count in counts)
    return Count(
        counts[0].examples, f"The data loaders of a step give batches of different sizes ({sizes})."
    )


def _count_tensors(batch: Any, parts: list[_Part]) -> Count:
    """Count the examples in a record of tensors, or in a plain list of tensors."""
    if not parts:
        return Count(None)
    shared = _agree(parts)
    # Named fields are fields: only the elements of a list may be something else.
    if not (_is_list(batch) and all(isinstance(x, Tensor) and x.dim() for x in batch)):
        return Count(parts[0].size) if shared else _count_unequal(batch, parts)
    shapes = {part.shape for part in parts}
    size, length = parts[0].size, len(parts)
    few = length <= _MOST_FIELDS
    if not shared:
        if len({len(shape) for shape in shapes}) > 1:
            return _count_unequal(batch, parts)
        if not few:
            return Count(length)
        return Count(
            length,
            f"A batch is a list of {length} tensors that differ in their first dimension. Each"
            " tensor may be one example, or one field of the batch.",
        )
    if not _may_be_images(parts) and (few or len(shapes) > 1):
        return Count(size)
    doubt = (
        f"A batch is a list of {length} tensors with the same first dimension, {size}. Each tensor"
        " may be"
    )
    if few or len(shapes) == 1:
        return Count(size, f"{doubt} one field of the batch, or one example.")
    # Many tensors of several shapes are images.
    return Count(length, f"{doubt} one example, or one field of the batch.")


def _count_unequal(batch: Any, parts: list[_Part]) -> Count:
    """Count the examples in a record whose tensors differ in their first dimension."""
    size, frequency = parts[0].size, Counter(part.size for part in parts)
    most = max(frequency.values())
    is_most_frequent = frequency[size] == most
    if is_most_frequent and [*frequency.values()].count(most) == 1:
        return Count(size, _ONE_DIFFERS)
    # A tie with a number of graphs is not theirs: an example may be a pair of them.
    names = ["batch_size"] if is_most_frequent else ["num_graphs", "batch_size"]
    stated = {*_find_stated(batch, names, frequency.keys(), is_whole=True)}
    if len(stated) == 1:
        return Count(stated.pop())
    return Count(size, _ONE_DIFFERS, withheld=not is_most_frequent)


def _find_stated(
    value: Any, names: Sequence[str], sizes: Collection[int], *, is_whole: bool = False
) -> Iterator[int]:
    """Yield what objects in a batch say of its size, by attributes or by their length.

    `sizes` are the first dimensions of the batch. The length of a dataclass says it if a tensor
    beside the dataclass has this first dimension, and none in it: boxes of images say how many
    boxes there are.
    """
    if isinstance(value, _WITHOUT_A_SIZE):
        return
    if not isinstance(value, (list, tuple, Mapping)):
        for name in names:
            if (stated := _whole_number(value, name)) is not None:
                yield stated
                return
        if is_dataclass(value) and isinstance(value, Sized):
            length = len(value)
            if length in sizes and (is_whole or length not in first_dimensions(value)):
                yield length
                return
    few = _is_list(value) and len(value) <= _MOST_FIELDS
    for one in value if few else _values(value) if _is_record(value) else ():
        yield from _find_stated(one, names, sizes)


def _possible_sizes(batch: Any) -> set[int]:
    """Return the first dimensions of the tensors in a batch, and the lengths of its lists."""
    lists = [one for one in (batch, *_fields(batch)) if _is_list(one)]
    return {*first_dimensions(batch), *map(len, lists)}


def _size_of_tensors(batch: Any, parts: list[_Part], lists: list[Sequence[Any]]) -> Count:
    """Return the tensors' first dimension. Lists must have as many elements, or share it."""
    size = parts[0].size
    if not _agree(parts):
        return _count_unequal(batch, parts)
    for listed in lists:
        if len(listed) != size and any(part.size != size for part in _parts(listed)):
            return Count(size, _ONE_DIFFERS)
    return Count(size)


def _count_records(batch: Sequence[Any]) -> Count:
    """Count the examples in a list of records of one kind. A record is an example or a batch."""
    parts_of_each = [_parts(record) for record in batch]
    parts = [part for of_one in parts_of_each for part in of_one]
    if not parts:
        return Count(None)
    by_rank = {len(part.shape) for part in parts}
    if _agree(parts):
        if len(by_rank) > 1 or parts[0].size == len(batch):
            return Count(parts[0].size)  # several ranks do not share it by chance
        if any(_is_scalar(field) for field in _fields(batch[0])):
            return Count(len(batch))
        doubt = (
            f"A batch is a list of {len(batch)} records whose tensors have the same first"
            f" dimension, {parts[0].size}. Each record may be"
        )
        if _may_be_images(parts):
            return Count(len(batch), f"{doubt} one example, or a batch.")
        return Count(parts[0].size, f"{doubt} a batch, or one example.")
    if len(by_rank) > 1 and all(map(_agree, parts_of_each)):
        return Count(
            len(batch),
            f"A batch is a list of {len(batch)} records, each with its own first dimension. Each"
            " record may be one example, or a batch.",
        )
    return Count(len(batch))


def _count_lists(lists: list[Sequence[Any]], *, alone: bool) -> Count:
    """Count the examples in several lists. A list is a field, an example, or a list of fields."""
    parts_of_each = [_parts(listed) for listed in lists]
    parts = [part for of_one in parts_of_each for part in of_one]
    if not parts:
        return Count(None)
    length = len(lists[0])
    of_one_length = all(len(listed) == length for listed in lists)
    a_list_a_field = of_one_length and all(map(_is_uniform, lists))
    plain = all(isinstance(x, Tensor) and x.dim() for listed in lists for x in listed)
    like_examples = length > _MOST_FIELDS or any(map(_may_be_images, parts_of_each))
    doubt = (
        f"A batch is {len(lists)} lists of {length} tensors. Each tensor may be a field of one"
        " example, or of a whole batch."
    )
    if plain and _agree(parts):
        if a_list_a_field and length > 1 and like_examples:
            return Count(length, doubt)
        return Count(parts[0].size)
    if a_list_a_field:
        as_batches = plain and all(map(_agree, parts_of_each)) and not like_examples
        return Count(length, doubt if as_batches else None)
    if alone and of_one_length and all(map(_is_uniform, zip(*lists, strict=True))):
        as_batches = plain and all(map(_agree, parts_of_each))
        return Count(
            len(lists),
            f"A batch is {len(lists)} lists, each with its own first dimension. Each list may be"
            " one example, or a batch."
            if as_batches
            else None,
        )
    return Count(parts[0].size, None if _agree(parts) else _ONE_DIFFERS)


def _agree(parts: Sequence[_Part]) -> bool:
    """Return whether all parts have the same first dimension."""
    return len({part.size for part in parts}) < 2


def _may_be_images(parts: Sequence[_Part]) -> bool:
    """Return whether each tensor may be an image, with its channels as the first dimension."""
    return parts[0].size <= _MOST_CHANNELS and all(len(part.shape) == 2 for part in parts)


def _batch_of_each(iterables: Any, batch: Any) -> list[Any] | None:
    """Return the batch of each loader; None if `batch` has another structure than the loaders."""
    if isinstance(iterables, Mapping):
        if not (isinstance(batch, Mapping) and iterables.keys() == batch.keys()):
            return None
        pairs = [(iterables[name], batch[name]) for name in iterables]
    elif isinstance(iterables, (list, tuple)):
        if not (isinstance(batch, (list, tuple)) and len(iterables) == len(batch)):
            return None
        pairs = list(zip(iterables, batch, strict=True))
    else:
        return [batch]
    found = [_batch_of_each(loaders, of_them) for loaders, of_them in pairs]
    if any(batches is None for batches in found):
        return None
    return [one for batches in found if batches is not None for one in batches]


def _size(value: Any) -> int | None:
    """Return the number of examples in a tensor, or in an object that is counted like one."""
    if isinstance(value, Tensor):
        return value.size(0) if value.dim() else None
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])  # which is always on the host
    if isinstance(value, (list, tuple, dict, str)):
        return None
    return _whole_number(value, "num_graphs")


def _whole_number(value: Any, name: str) -> int | None:
    """Return an attribute that is a whole number; None if there is none."""
    try:
        found = getattr(value, name, None)
    except Exception:  # what users make themselves may raise anything for a name it lacks
        return None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _parts(value: Any) -> list[_Part]:
    """Return everything with a first dimension, at any depth, in order."""
    found: list[_Part] = []
    _find_parts(value, found)
    return found


def _find_parts(value: Any, found: list[_Part]) -> None:
    inner: Iterable[Any] = ()
    if type(value) is dict:  # the quick way: most of what is nested are dicts and lists
        inner = value.values()
    elif type(value) is not list and (size := _size(value)) is not None:
        found.append(_Part(size, _shape_within(value)))
    elif _is_list(value):
        # Thousands of coordinates or tokens are not looked at one by one.
        is_text = len(value) > _MOST_FIELDS and isinstance(value[0], _TEXT_OR_NUMBER)
        inner = () if is_text and isinstance(value[-1], _TEXT_OR_NUMBER) else value
    elif _is_record(value):
        inner = _values(value)
    for one in inner:
        if type(one) not in _WITH_NOTHING_WITHIN:
            _find_parts(one, found)


def _shape_within(value: Any) -> tuple[int, ...]:
    """Return the shape of one example, as far as all examples have the same shape."""
    if not isinstance(value, Tensor):
        return ()
    return (-1,) * (value.dim() - 1) if value.is_nested else tuple(value.shape[1:])


def _fields(value: Any) -> Iterator[Any]:
    """Yield the fields of a record or list, and the fields of the records in it."""
    for one in value if _is_list(value) else _values(value) if _is_record(value) else ():
        if _is_record(one):
            yield from _fields(one)
        else:
            yield one


def _values(record: Any) -> Iterator[Any]:
    if isinstance(record, Mapping):
        yield from record.values()
    elif isinstance(record, tuple):
        yield from record
    else:
        for field in fields(record):
            yield getattr(record, field.name, None)  # not all are set by `__init__`


def _is_record(value: Any) -> bool:
    if isinstance(value, (Tensor, PackedSequence, str)):
        return False
    if isinstance(value, tuple):
        return hasattr(value, "_fields")
    return isinstance(value, Mapping) or (is_dataclass(value) and not isinstance(value, type))


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    if type(value) is list:
        return True
    if isinstance(value, tuple):
        return not hasattr(value, "_fields")
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, Tensor))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (str, bytes, Number)) or (
        isinstance(value, Tensor) and not value.dim()
    )


def _is_uniform(values: Sequence[Any]) -> bool:
    """Return whether all elements are alike: tensors of one rank, records of the same fields."""
    return len({_kind(value) for value in values}) == 1


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor, value.dim()
    if isinstance(value, Mapping):
        return Mapping, frozenset(value)
    return type(value)
