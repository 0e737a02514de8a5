"""MeanAbsoluteError and MeanSquaredError."""

import math

import pytest
import torch

from hapi.metrics import MeanAbsoluteError, MeanSquaredError


@pytest.mark.parametrize(
    ("cls", "name", "expected"), [(MeanAbsoluteError, "mae", 2.0), (MeanSquaredError, "mse", 14 / 3)]
)
def test_the_mean_over_all_elements_of_uneven_batches(cls, name, expected):
    metric = cls()
    metric.update(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
    metric.update(torch.tensor([0.0]), torch.tensor([3.0]))
    assert metric.name == name
    assert metric.compute() == pytest.approx(expected, abs=1e-15)


def test_elements_of_several_dimensions_and_integers():
    metric = MeanAbsoluteError("error")
    metric.update(torch.zeros(2, 3), torch.arange(6).reshape(2, 3))
    assert metric.compute() == 2.5
    assert metric.name == "error"


@pytest.mark.parametrize(("outputs", "labels"), [((4, 1), (4,)), ((4,), (4, 1))])
def test_a_column_fits_a_flat_tensor_and_is_not_broadcast(outputs, labels):
    metric = MeanSquaredError()
    metric.update(torch.arange(4.0).view(outputs), torch.arange(4.0).view(labels))
    assert metric.compute() == 0.0


@pytest.mark.parametrize(("outputs", "labels"), [((4, 2), (4,)), ((4,), (3,)), ((4, 1), (1, 4))])
def test_shapes_that_do_not_fit(outputs, labels):
    with pytest.raises(ValueError, match=r"do not fit each other. Write a subclass whose update reshapes them"):
        MeanSquaredError().update(torch.zeros(outputs), torch.zeros(labels))


def test_sums_are_float64():
    metric = MeanAbsoluteError()
    metric.update(torch.full((1000,), 1e4), torch.zeros(1000))
    metric.update(torch.full((1,), 0.0009765625), torch.zeros(1))
    assert metric.compute() * 1001 == pytest.approx(1e7 + 0.0009765625, abs=1e-8)


def test_nan_of_nothing():
    assert math.isnan(MeanAbsoluteError().compute())
