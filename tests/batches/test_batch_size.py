# SPDX-License-Identifier: Apache-2.0
"""Every structure of a batch that is in use, and how many examples it holds."""

from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from noisescale.batches.batch_size import Count, examples_in, examples_of_loaders, rows_in

Fields = namedtuple("Fields", ["x", "y"])


@dataclass
class Record:
    x: Any
    y: Any


class Graphs:
    """As PyTorch Geometric's: one large graph made of several."""

    num_graphs = 5
    x = torch.zeros(40, 3)


@dataclass
class Molecules:
    """As chemprop's: molecules in one graph, of which only the object knows how many there are."""

    atoms: Tensor
    bonds: Tensor
    ends: Tensor
    reverse: Tensor
    molecule: Tensor
    number: int

    def __len__(self) -> int:
        return self.number


class Raises:
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


@dataclass
class Unset:
    x: Any
    y: Any = field(init=False)


def of(*shape: int) -> Tensor:
    return torch.zeros(*shape)


def molecules(number: int = 16) -> Molecules:
    return Molecules(of(117, 72), of(240, 14), of(2, 240), of(240), of(117), number)


@dataclass
class Boxes:
    """Knows the first dimension of its first tensor."""

    corners: Tensor
    beside: Any = None
    more: Any = None

    def __len__(self) -> int:
        return len(self.corners)


class Sampled:
    """As the batches of samplers of neighbours."""

    batch_size = 5


def images(count: int = 16, equal: bool = False, channels: int = 3) -> list[Tensor]:
    return [of(channels, 20 if equal else 20 + i, 30) for i in range(count)]


def targets(count: int = 16) -> list[dict[str, Tensor]]:
    return [{"boxes": of(i % 4, 4), "labels": of(i % 4)} for i in range(count)]


IN_NO_DOUBT = {
    "a tensor": (of(16, 8), 16),
    "fields": ([of(16, 8), of(16)], 16),
    "columns of a table": ((of(16), of(16), of(16)), 16),
    "fields of several lengths": ((of(16, 10), of(16, 7)), 16),
    "a record within a tuple": ((of(16, 8), {"y": of(16)}), 16),
    "images and their masks, a short batch": ([of(4, 3, 8, 8), of(4, 1, 8, 8)], 4),
    "two views and labels, a short batch": (([of(4, 3, 8, 8)] * 2, [of(4)] * 2), 4),
    "crops of two sizes": ([of(64, 3, 22, 22)] * 2 + [of(64, 3, 9, 9)] * 8, 64),
    "a mapping": ({"x": of(16, 8), "y": of(16)}, 16),
    "a mapping of another kind": (UserDict(x=of(16, 8), y=of(16)), 16),
    "images and reconstructions by name": ({"x": of(2, 3, 8, 8), "y": of(2, 3, 8, 8)}, 2),
    "scalars beside": ({"weight": torch.tensor(0.5), "x": of(16, 8), "step": 3, "none": None}, 16),
    "text beside": ({"x": of(16, 8), "text": ["a"] * 16, "task": "parse"}, 16),
    "a shape beside": ({"x": of(16, 8), "size": (224, 224)}, 16),
    "a named tuple": (Fields(of(16, 8), of(16)), 16),
    "a dataclass": (Record(of(16, 8), of(16)), 16),
    "a dataclass of mappings": (Record({"a": of(16, 8)}, {"b": of(16)}), 16),
    "two views": (([of(16, 8), of(16, 8)], of(16)), 16),
    "pairs of fields": ([[of(16, 8), of(16, 8)], [of(16), of(16)]], 16),
    "images, and a target of each": ({"x": of(16, 3, 8, 8), "labels": targets()}, 16),
    "a list of images beside a tensor": ((images(), of(16)), 16),
    "packed sequences": (pack_sequence([of(9, 2), of(5, 2), of(2, 2)]), 3),
    "packed sequences and lengths": ((pack_sequence([of(9), of(5), of(2)]), of(3)), 3),
    "graphs": (Graphs(), 5),
    "graphs with labels": ((Graphs(), of(5)), 5),
    "nodes, graphs and labels": ((of(40, 3), Graphs(), of(5)), 5),
    "molecules": (Fields(molecules(), of(16, 1)), 16),
    "molecules with weights and limits": ((molecules(), None, *[of(16, 1)] * 4), 16),
    "a dataclass that knows its number": (Boxes(of(16, 4), of(37, 4), of(37)), 16),
    "nodes around labelled ones": ({"x": of(40, 3), "edges": of(2, 90), "of": Sampled()}, 5),
    "sequences of their own lengths": ([of(5 + i) for i in range(16)], 16),
    "few sequences in and out": (([of(7), of(5), of(9)], [of(4), of(6), of(5)]), 3),
    "detection": ((tuple(images()), tuple(targets())), 16),
    "detection, equal images": ((tuple(images(equal=True)), tuple(targets())), 16),
    "detection, a batch of one": ((tuple(images(1)), tuple(targets(1))), 1),
    "detection, as many boxes as channels": (([of(3, 8, 8)] * 2, [{"boxes": of(3, 4)}] * 2), 2),
    "images and their classes": ((tuple(images(equal=True)), tuple(range(16))), 16),
    "images and their names": ({"images": images(), "names": ["a"] * 16}, 16),
    "images and masks": ((images(), [image[0] for image in images()]), 16),
    "images and their scalars": ((images(), [torch.tensor(1)] * 16), 16),
    "an example after the other": ([(image, 7) for image in images()], 16),
    "an example after the other, with targets": (list(zip(images(), targets(), strict=True)), 16),
    "a list of records": ([{"x": x} | t for x, t in zip(images(), targets(), strict=True)], 16),
    "a list of records with scalars": ([{"x": x, "height": 20} for x in images(equal=True)], 16),
    "a list of records, one sequence each": ([{"ids": of(7)}, {"ids": of(5)}], 2),
    "an example after the other, its number first": ([(7, image) for image in images()], 16),
    "an example after the other, of many fields": ([(7, x, *[0.5] * 9, x) for x in images()], 16),
    "an object that lacks names in its own way": ({"x": of(16, 8), "graph": Raises()}, 16),
    "a dataclass with a field that is not set": (Unset(of(16, 8)), 16),
    "a list of batches alike": ([{"x": of(16, 8), "y": of(16)}] * 2, 16),
}


@pytest.mark.parametrize("case", IN_NO_DOUBT)
def test_a_batch_holds(case: str) -> None:
    batch, examples = IN_NO_DOUBT[case]

    assert examples_in(batch) == Count(examples, None)


POLYGONS = [{"x": x, "annotations": [{"box": [1.0, 2.0]}]} for x in images(equal=True)]

IN_DOUBT = {
    "equal images": (images(equal=True), 3, "16 tensors"),
    "images of one number of channels": (images(), 16, "16 tensors"),
    "many sequences of one length": ([of(50)] * 16, 50, "16 tensors"),
    "a mapping of equal images": ({"images": images(equal=True)}, 3, "field of the batch, or one"),
    "pairs of images": ((images(equal=True), images(equal=True)), 16, "2 lists of 16 tensors"),
    "three equal images": (images(3, equal=True), 3, "3 tensors"),
    "two images": (images(2), 3, "2 tensors"),
    "two equal images": (images(2, equal=True), 3, "field of the batch, or one"),
    "few sequences in and out": ([of(4, 10, 7), of(4, 12, 7)], 4, "dimension, 4"),
    "few images of one number of channels": (images(8), 3, "field of the batch, or one"),
    "records of equal images": ([{"x": x} for x in images(equal=True)], 16, "record may be one"),
    "records of equal images, and polygons": (POLYGONS, 16, "record may be one"),
    "records of equal sequences": ([{"x": of(50)}] * 16, 50, "may be a batch"),
    "few sequences of their own lengths": ([of(7), of(5), of(9)], 3, "3 tensors that differ"),
    "labelled and unlabelled images": ([of(32, 3, 8, 8), of(224, 3, 8, 8)], 2, "2 tensors that"),
    "time first": ([of(35, 20), of(37, 20)], 2, "one example, or one field"),
    "nodes and edges": ([of(100, 7), of(2, 400)], 2, "one example, or one field"),
    "unequal fields": ({"x": of(6, 2), "offsets": of(3)}, 6, "differ"),
    "images and a box of each": ([of(16, 3, 8, 8), of(37, 5)], 16, "differ"),
    "inputs, labels and a table": ({"x": of(16, 8), "y": of(16), "table": of(50, 8)}, 16, "differ"),
    "pairs of graphs": ({"y": of(3), "graphs": Graphs()}, 3, "differ"),
    "boxes that know their number": ([of(16, 3, 8, 8), Boxes(of(37, 4))], 16, "differ"),
    "a length that no tensor has": (Fields(molecules(3), of(16, 1)), 117, "differ"),
    "a length against most tensors": ((of(117), molecules(2)), 117, "differ"),
    "unequal fields, a scalar first": ([torch.tensor(1.0), of(7), of(5, 2)], 7, "differ"),
    "a list of another length": ((of(16, 8), [of(3), of(4)]), 16, "differ"),
    "lists of several sizes": ([[of(16, 8), of(16)], [of(32, 8), of(32)]], 2, "2 lists, each"),
    "records of several sizes": ([{"x": of(n, 8), "y": of(n)} for n in (16, 32)], 2, "2 records,"),
}


@pytest.mark.parametrize("case", IN_DOUBT)
def test_a_batch_that_may_hold_another_number_says_so(case: str) -> None:
    batch, examples, doubt = IN_DOUBT[case]

    count = examples_in(batch)

    assert (count.examples, count.withheld) == (examples, False)
    assert doubt in count.doubt


BOXES = {"images": of(16, 3, 8, 8), "boxes": of(37, 4), "classes": of(37)}

WITHHELD = {
    "images and their boxes": BOXES,
    "images and their boxes in a tuple": tuple(BOXES.values()),
    "tokens of bags": {"tokens": of(90), "offsets": of(16), "labels": of(16)},
    "two lengths": (of(16), of(5), molecules(16), molecules(5)),
    "images and their boxes, and names": (*BOXES.values(), ["a"] * 16),
}


@pytest.mark.parametrize("case", WITHHELD)
def test_a_number_that_most_tensors_deny_is_withheld(case: str) -> None:
    assert examples_in(WITHHELD[case]).withheld


COUNTED: dict[str, tuple[Any, float | None, int | None]] = {
    "rows, as the function says": (BOXES, 37, 37),
    "the first dimension, as the function does not say": (BOXES, None, 16),
    "pixels, say": (BOXES, 1024, 16),
    "images of a list": (images(equal=True), 16, 16),
    "boxes of images, and no doubt": ((tuple(images(5)), tuple(targets(5))), 3, 5),
    "copies, and no doubt": ([of(16, 8), of(16)], 8, 16),
    "text": ("text", 4, None),
}


@pytest.mark.parametrize("case", COUNTED)
def test_rows_are_what_a_function_counts_where_the_structure_allows_it(case: str) -> None:
    batch, counted, rows = COUNTED[case]

    assert rows_in(batch, counted) == rows


WITHOUT_TENSORS = [
    *(None, [], (), {}, "text", ["one", "two"], [1, 2, 3], 7, torch.tensor(1.0), [[], []]),
    *(object(), [["one", "two"], [0, 1]], [{"text": "one"}, {"text": "two"}]),
]


def test_a_batch_without_tensors_is_not_counted() -> None:
    assert [*map(examples_in, WITHOUT_TENSORS)] == [Count(None, None)] * len(WITHOUT_TENSORS)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_counts_what_it_is_made_of() -> None:
    nested = torch.nested.nested_tensor([of(3, 2), of(5, 2)])  # which has no shape
    jagged = torch.nested.nested_tensor([of(3), of(5)], layout=torch.jagged)

    batches = nested, (nested, of(2)), {"x": nested}, [jagged, jagged]

    assert [*map(examples_in, batches)] == [Count(2, None)] * 4


class Coordinates(list[float]):
    """Tells how much of it is looked at."""

    looks = 0

    def __iter__(self) -> Any:
        raise AssertionError("It was gone through.")

    def __getitem__(self, at: Any) -> Any:
        Coordinates.looks += 1
        return super().__getitem__(at)


def test_long_lists_of_numbers_are_not_gone_through() -> None:
    """As polygons of COCO are: a batch has tens of thousands of coordinates."""
    polygons = [Coordinates([0.5] * 1000) for _ in range(16)]
    annotations = [[{"segmentation": [polygon]}] for polygon in polygons]

    assert examples_in((tuple(images()), tuple(annotations))) == Count(16, None)
    assert Coordinates.looks == 2 * 16


LOADERS = [object(), object()]
NAMED = dict(zip("ab", LOADERS, strict=True))
SEVERAL = {
    "that agree": ({"a": 1, "b": LOADERS}, {"a": of(16), "b": [[of(16, 8)], of(16)]}, 16),
    "of which one has run out": (NAMED, {"a": None, "b": [of(32, 8), of(32)]}, 32),
    "rearranged": ([*LOADERS, object()], (of(48, 8), of(48)), 48),
    "rearranged to a tensor": (NAMED, of(48, 8), 48),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_several_loaders_are_counted_once(case: str) -> None:
    loaders, batch, examples = SEVERAL[case]

    assert examples_of_loaders(loaders, batch) == Count(examples, None)


@pytest.mark.parametrize("shapes", [[(16, 8), (32, 8)], [(16, 8), (32, 4)]])
def test_several_loaders_that_differ_are_in_doubt(shapes: Any) -> None:
    """Two tensors of one rank would be two sequences in the batch of one loader."""
    count = examples_of_loaders(LOADERS, [of(*shape) for shape in shapes])

    assert count.examples == 16
    assert "(16, 32)" in count.doubt
