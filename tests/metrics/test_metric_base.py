"""Metric: states, values, and what a subclass may define."""

import copy

import numpy
import pytest
import torch

import hapi
from hapi.metrics import Accuracy, Metric


class Peak(Metric):
    def __init__(self):
        super().__init__(name="peak")
        self.add_state("largest", torch.tensor(-torch.inf), reduce="max")
        self.add_state("smallest", torch.tensor(torch.inf), reduce="min")
        self.add_state("seen", 0)
        self.add_state("weight", 0.0)
        self.add_state("all", torch.empty(0), reduce="cat")

    def update(self, outputs, labels):
        self.largest = torch.maximum(self.largest, outputs.max())
        self.smallest = torch.minimum(self.smallest, outputs.min())
        self.seen += len(outputs)
        self.weight += 0.5
        self.all.append(outputs)

    def compute(self):
        return float(self.largest - self.smallest)


def test_states_start_at_their_defaults_and_reset_to_them():
    metric = Peak()
    metric.update(torch.tensor([1.0, 4.0]), None)
    assert metric.compute() == 3.0
    assert (metric.seen, metric.weight) == (2, 0.5)
    metric.reset()
    assert metric.largest == -torch.inf and metric.smallest == torch.inf
    assert (metric.seen, metric.weight, metric.all) == (0, 0.0, [])


def test_a_reset_does_not_share_the_default():
    metric = Accuracy()
    metric.update(torch.eye(3), torch.arange(3))
    metric.reset()
    metric.update(torch.eye(3), torch.arange(3))
    metric.reset()
    assert metric.hits.tolist() == [0]


def test_numbers_stay_python_numbers_through_saving_and_loading():
    metric = Peak()
    metric.update(torch.tensor([1.0, 4.0]), None)
    other = Peak()
    other.load_states(metric.states())
    assert (type(other.seen), other.seen) == (int, 2)
    assert (type(other.weight), other.weight) == (float, 0.5)
    assert other.concatenated("all").tolist() == [1.0, 4.0]


def test_loaded_states_are_copies():
    metric = Accuracy()
    metric.update(torch.eye(3), torch.arange(3))
    saved = metric.states()
    other = Accuracy()
    other.load_states(saved)
    other.update(torch.eye(3), torch.arange(3))
    assert int(saved["hits"]) == 3 and int(other.hits) == 6


def test_states_of_another_metric_are_refused():
    with pytest.raises(ValueError, match=r"those of another metric. Pass the metrics that were saved"):
        Peak().load_states(Accuracy().states())


def test_cat_states_join_lazily_and_stay_joined():
    metric = Peak()
    metric.update(torch.tensor([1.0]), None)
    metric.update(torch.tensor([2.0, 3.0]), None)
    assert len(metric.all) == 2
    assert metric.concatenated("all").tolist() == [1.0, 2.0, 3.0]
    assert len(metric.all) == 1


def test_an_empty_cat_state_has_the_dtype_of_its_default():
    metric = Metric()
    metric.add_state("ids", torch.empty(0, dtype=torch.int32), reduce="cat")
    assert metric.states()["ids"].dtype == torch.int32
    metric.ids.append(torch.tensor(7))  # 0-dim pieces count as one row
    metric.ids.append(torch.tensor([8]))
    assert metric.concatenated("ids").tolist() == [7, 8]


def test_merge_applies_each_reduction_and_a_rank_without_updates_is_neutral():
    ranks = [Peak() for _ in range(4)]
    ranks[0].update(torch.tensor([1.0, 4.0]), None)
    ranks[2].update(torch.tensor([-2.0]), None)
    merged = Peak()
    merged.merge([rank.states() for rank in ranks])
    assert (merged.largest, merged.smallest) == (4.0, -2.0)
    assert (merged.seen, merged.weight) == (3, 1.0)
    assert merged.concatenated("all").tolist() == [1.0, 4.0, -2.0]


def test_merge_counts_a_default_other_than_zero_once():
    ranks = [Metric() for _ in range(3)]
    for number, rank in enumerate(ranks):
        rank.add_state("pseudo", torch.tensor(1.0))
        rank.pseudo += number
    merged = copy.deepcopy(ranks[0])
    merged.merge([rank.states() for rank in ranks])
    assert merged.pseudo == 1 + 0 + 1 + 2


def test_merge_keeps_the_dtype_of_the_data_though_a_rank_has_none():
    ranks = [Peak(), Peak()]
    ranks[1].all.append(torch.tensor([2**53 + 1]))
    merged = Peak()
    merged.merge([rank.states() for rank in ranks])
    assert merged.concatenated("all").tolist() == [2**53 + 1]


def test_merge_of_ranks_that_all_have_nothing():
    merged = Peak()
    merged.merge([Peak().states(), Peak().states()])
    assert merged.seen == 0 and merged.concatenated("all").shape == (0,)


def test_the_name_defaults_to_the_class_in_snake_case():
    class TokenErrorRate(Metric):
        pass

    assert TokenErrorRate().name == "token_error_rate"
    assert TokenErrorRate("ter").names == ["ter"]


def test_an_empty_name_is_no_key():
    with pytest.raises(ValueError, match=r"name='', but the name is its key.*name='accuracy', or leave it out"):
        Accuracy(name="")


def test_a_subclass_need_not_call_super_init():
    class Bare(Metric):
        def __init__(self):
            self.add_state("n", 0)

    assert (Bare().name, Bare().n) == ("bare", 0)


def test_result_follows_from_compute_and_compute_from_result():
    class ByCompute(Metric):
        def compute(self):
            return 0.25

    class ByResult(Metric):
        def result(self):
            return torch.tensor(0.75)

    assert ByCompute().result().item() == 0.25
    assert ByResult().compute() == 0.75


def test_the_most_derived_of_the_two_gives_the_values():
    class ErrorRate(Accuracy):
        def compute(self):
            return 1 - super().compute()

    metric = ErrorRate(name="error")
    metric.update(torch.eye(4), torch.tensor([0, 1, 2, 0]))
    assert metric.values()["error"].item() == 0.25


def test_several_values():
    class Two(Metric):
        def __init__(self, keys):
            self.keys = keys

        @property
        def names(self):
            return ["low", "high"]

        def compute(self):
            return dict.fromkeys(self.keys, 1.0)

    assert Two(["low", "high"]).values() == {"low": torch.tensor(1.0), "high": torch.tensor(1.0)}
    assert Two(["low", "high"]).compute() == {"low": 1.0, "high": 1.0}
    with pytest.raises(ValueError, match="Override the property `names`"):
        Two(["low"]).values()


def test_a_metric_without_update_or_value_says_what_to_define():
    with pytest.raises(NotImplementedError, match=r"Define update\(self, outputs, labels\)"):
        Metric().update(None, None)
    with pytest.raises(NotImplementedError, match=r"Define compute\(self\)"):
        Metric().compute()


@pytest.mark.parametrize("name", ["hits", "update", "two words"])
def test_a_state_needs_a_free_name(name):
    with pytest.raises(ValueError, match="Choose another name"):
        Accuracy().add_state(name, 0)


def test_an_unknown_reduction():
    with pytest.raises(ValueError, match="Write one of 'sum', 'max', 'min', 'cat'"):
        Metric().add_state("x", 0, reduce="mean")


@pytest.mark.parametrize("default", [torch.zeros(1), 0])
def test_a_cat_state_starts_empty(default):
    with pytest.raises(ValueError, match=r"Write an empty tensor: torch.empty\(0\)"):
        Metric().add_state("x", default, reduce="cat")


def test_to_moves_states_now_and_after_reset():
    metric = Peak().to("meta")
    assert metric.largest.device.type == "meta"
    metric.reset()
    assert metric.largest.device.type == "meta"
    assert metric.concatenated("all").device.type == "meta"


def test_states_are_float32_where_the_device_has_no_float64():
    metric = Metric()
    metric.add_state("total", torch.tensor(0.0, dtype=torch.float64))
    metric._device = torch.device("mps")
    moved = []

    class Spy(torch.Tensor):
        def to(self, device):
            moved.append((self.dtype, device))
            return self

    metric._placed(torch.tensor(0.0, dtype=torch.float64).as_subclass(Spy))
    assert moved == [(torch.float32, torch.device("mps"))]


def test_a_number_that_began_as_0_keeps_its_fraction():
    class Total(Metric):
        def __init__(self):
            super().__init__("total")
            self.add_state("total", 0)

        def update(self, outputs, labels):
            self.total += float(outputs.sum())

        def compute(self):
            return self.total

    network = torch.nn.Identity()
    model = hapi.Model(network).prepare(metrics=Total())
    data = (torch.tensor([0.25, 0.5, 0.125]), torch.zeros(3))
    assert model.evaluate(data, batch_size=2, verbose=0)["total"] == 0.875


class Given(Peak):
    """Computes what it is given, by one of the two methods."""

    def __init__(self, value, method):
        super().__init__()
        self.value = value
        setattr(type(self), method, lambda self: self.value)


@pytest.mark.parametrize("value", [None, "x", [1.0, 2.0], 10**400, 1j, torch.tensor([1.0, 2.0]), torch.empty(0), {}])
@pytest.mark.parametrize("method", ["compute", "result"])
def test_a_value_that_is_no_number_is_refused_in_words(value, method):
    metric = type("Fresh", (Given,), {})({"peak": value} if value != {} else value, method)
    with pytest.raises((TypeError, ValueError), match=r"(?s)peak.*(logs hold one number per name. Return|Override)"):
        metric.values()


@pytest.mark.parametrize("value", [1e300, 1 / 3, True, 7, torch.tensor([0.5]), numpy.float64(0.1), numpy.float32(0.5)])
@pytest.mark.parametrize("method", ["compute", "result"])
def test_a_number_keeps_all_its_digits(value, method):
    read = type("Fresh", (Given,), {})(value, method).values()["peak"]
    assert read.shape == () and read.item() == float(value)
