"""Tally: weighted losses, running and reduced values, non-finite losses, saved passes."""

import io
import math

import pytest
import torch

from hapi.distributed import group
from hapi.metrics import Accuracy, Auc, MeanAbsoluteError, Metric
from hapi.metrics.adapters import as_metric
from hapi.metrics.tally import Tally

CPU = torch.device("cpu")
OUTPUTS, LABELS = torch.eye(4), torch.tensor([0, 1, 2, 0])


def tally(*metrics):
    return Tally(list(metrics), CPU)


def add(target, loss, weight):
    target.update(torch.tensor(loss) if loss is not None else None, weight, OUTPUTS, LABELS)


def reduce_together(monkeypatch, tallies):
    """What `reduced` returns on each rank, were these tallies the ranks'; and how many collectives it took."""
    states = [each.state() for each in tallies]
    calls = []
    monkeypatch.setattr(group, "gather_objects", lambda mine: calls.append(mine) or states)
    values = [each.reduced() for each in tallies]
    assert len(calls) == len(tallies)
    return values


# ------------------------------------------------------------------------------------------------------ loss


@pytest.mark.parametrize("as_weight", [int, float, torch.tensor, lambda n: torch.tensor(float(n))])
def test_the_loss_is_the_mean_over_samples(as_weight):
    running = tally()
    add(running, 1.0, as_weight(3))
    add(running, 5.0, as_weight(1))
    assert running.logs()["loss"].item() == 2.0
    assert running.reduced() == {"loss": 2.0}


def test_weights_of_both_kinds_add_up():
    running = tally()
    add(running, 1.0, 2)
    add(running, 4.0, torch.tensor(1))
    assert running.reduced()["loss"] == 2.0


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_a_batch_of_weight_zero_changes_nothing_though_its_mean_is_nan(weight):
    running = tally()
    add(running, math.nan, weight)
    assert math.isnan(running.reduced()["loss"]) and math.isnan(running.logs()["loss"])
    add(running, 2.0, 4)
    add(running, math.nan, weight)
    assert running.reduced() == {"loss": 2.0}
    assert running.take_nonfinite() is None


def test_a_loss_of_half_precision_is_summed_in_float64():
    running = tally()
    for _ in range(3000):
        running.update(torch.tensor(1.0, dtype=torch.bfloat16), 1, None, None)
    running.update(torch.tensor(2**-10, dtype=torch.float16), torch.tensor(1), None, None)
    assert running.reduced()["loss"] * 3001 == 3000 + 2**-10


def test_no_loss_no_key():
    running = tally(Accuracy())
    assert running.logs() == running.reduced() == {}
    add(running, None, 4)
    assert list(running.logs()) == ["acc"] and running.reduced() == {"acc": 0.75}


def test_a_nan_loss_is_seen_in_the_mean():
    running = tally()
    add(running, 1.0, 1)
    add(running, math.nan, 1)
    assert math.isnan(running.reduced()["loss"])


# --------------------------------------------------------------------------------------------------- metrics


def test_logs_are_fresh_unread_tensors_in_order(monkeypatch):
    running = tally(Accuracy(topk=(1, 2)), MeanAbsoluteError())
    # One-hot labels are looked at once.
    running.update(torch.tensor(1.0), 4, OUTPUTS, torch.eye(4))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a value was read"))
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: pytest.fail("a value was read"))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: pytest.fail("a value was read"))
    for weight in (4, torch.tensor(4)):
        running.update(torch.tensor(1.0), weight, OUTPUTS, torch.eye(4))
    logs = running.logs()
    assert list(logs) == ["loss", "acc_top1", "acc_top2", "mae"]
    assert all(value.ndim == 0 for value in logs.values())
    logs.clear()
    assert len(running.logs()) == 4


def test_the_user_s_metrics_are_copied_and_start_anew():
    accuracy = Accuracy()
    accuracy.update(OUTPUTS, torch.zeros(4).long())
    running = tally(accuracy)
    add(running, None, 4)
    assert running.reduced()["acc"] == 0.75
    assert accuracy.compute() == 0.25


def test_updates_keep_no_graph():
    running = tally(MeanAbsoluteError(), Auc())
    outputs = torch.rand(4, requires_grad=True)
    running.update(outputs.sum().detach(), 4, outputs * 1, torch.tensor([0, 1, 0, 1]))
    assert not any(value.requires_grad for value in running.logs().values())


def test_two_values_with_one_key():
    class Dynamic(Metric):
        def __init__(self):
            self.add_state("n", 0)

        def update(self, outputs, labels):
            self.n += 1

        def values(self):
            return {"acc": torch.tensor(1.0)}

    running = tally(Accuracy(), Dynamic())
    add(running, None, 1)
    with pytest.raises(ValueError, match=r"called 'acc'.*Give one of them another name"):
        running.logs()


class Undeclared(Metric):
    def __init__(self, attribute, value, change):
        self.add_state("total", torch.tensor(0.0))
        setattr(self, attribute, value)
        self.attribute, self.change = attribute, change

    def update(self, outputs, labels):
        self.total += 1
        setattr(self, self.attribute, self.change(getattr(self, self.attribute)))

    def compute(self):
        return 0.0


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (0, lambda n: n + 1),
        (torch.zeros(2), lambda t: t + 1),
        (torch.zeros(2), lambda t: t.add_(1)),
        ([], lambda items: items.append(1) or items),
    ],
    ids=["number", "replaced tensor", "changed tensor", "list"],
)
def test_what_a_metric_keeps_without_declaring_it_is_found(value, change):
    with pytest.raises(TypeError, match=r'changed seen in update.*Write self.add_state\("seen", default\)'):
        add(tally(Undeclared("seen", value, change)), None, 1)


def test_attributes_that_stay_need_not_be_declared():
    add(tally(Undeclared("weights", torch.ones(2), lambda t: t)), None, 1)
    add(tally(Undeclared("nothing_yet", None, lambda _: torch.ones(2))), None, 1)


# ----------------------------------------------------------------------------------------------------- ranks


def test_ranks_with_unequal_data_equal_one_process(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    one, ranks = tally(Accuracy(), Auc()), [tally(Accuracy(), Auc()) for _ in range(3)]
    for number in range(7):
        n = int(torch.randint(1, 6, (), generator=generator))
        outputs, labels = torch.randn(n, 2, generator=generator), torch.randint(0, 2, (n,), generator=generator)
        for each in (one, ranks[2 * (number % 2)]):  # rank 1 has no update at all
            each.update(outputs.abs().mean(), n, outputs, labels)
    expected = one.reduced()
    values = reduce_together(monkeypatch, ranks)
    assert values[0] == values[1] == values[2]
    assert values[0] == {key: pytest.approx(value, abs=1e-15) for key, value in expected.items()}
    assert list(values[0]) == list(expected)


def test_a_key_that_only_some_ranks_have(monkeypatch):
    ranks = [tally(Accuracy()) for _ in range(3)]
    add(ranks[1], None, 4)
    add(ranks[2], 3.0, torch.tensor(4))
    values = reduce_together(monkeypatch, ranks)
    assert values == [{"loss": 3.0, "acc": 0.75}] * 3


def test_no_data_anywhere(monkeypatch):
    assert reduce_together(monkeypatch, [tally(Accuracy()), tally(Accuracy())]) == [{}, {}]


def test_one_collective_though_nothing_was_seen(monkeypatch):
    calls = []
    monkeypatch.setattr(group, "gather_objects", lambda mine: calls.append(mine) or [mine])
    tally(Accuracy(), Auc()).reduced()
    assert len(calls) == 1


def test_reducing_changes_nothing():
    running = tally(Accuracy(), Auc())
    running.update(torch.tensor(1.0), 4, torch.rand(4, 2), torch.tensor([0, 1, 0, 1]))
    assert running.reduced() == running.reduced()
    assert {name: float(value) for name, value in running.logs().items()} == running.reduced()


# ------------------------------------------------------------------------------------------------ non-finite


def test_take_nonfinite_tells_how_many_updates_ago():
    running = tally()
    assert running.take_nonfinite() is None
    for loss in (1.0, 2.0):
        add(running, loss, 1)
    assert running.take_nonfinite() is None
    for loss in (1.0, math.inf, 2.0, math.nan, 3.0):
        add(running, loss, torch.tensor(1))
    assert running.take_nonfinite() == 3
    assert running.take_nonfinite() is None
    # The sum has no value from there on.
    add(running, 1.0, 1)
    assert running.take_nonfinite() == 0


def test_what_was_forgotten_is_not_told():
    running = tally()
    add(running, math.inf, 1)
    running.forget_nonfinite()
    assert running.take_nonfinite() is None


def test_a_sum_without_a_value_that_was_taken_over_is_no_loss_of_this_run():
    before, running = tally(), tally()
    add(before, math.inf, 1)
    running.go_on_from([before.state()])
    add(running, 1.0, 1)
    assert running.take_nonfinite() is None
    assert running.logs()["loss"].item() == running.reduced()["loss"] == math.inf
    add(running, math.nan, 1)
    assert running.take_nonfinite() == 0


def test_a_tally_and_small_batches_that_wait_make_few_tensors(monkeypatch):
    made = []
    for name in ("unbind", "split", "new_empty", "__getitem__"):
        original = getattr(torch.Tensor, name)

        def counting(*args, original=original, **kwargs):
            parts = original(*args, **kwargs)
            made.extend(parts if isinstance(parts, tuple) else [parts])
            return parts

        monkeypatch.setattr(torch.Tensor, name, counting)
    running = tally(Accuracy())
    assert len(made) < 10
    generator = torch.Generator().manual_seed(0)
    hits = samples = 0
    # In twos, so that each second one waits.
    for number in range(40):
        size = 1 + number // 2 % 2
        outputs, labels = torch.randn(size, 2, generator=generator), torch.randint(2, (size,), generator=generator)
        running.update(None, size, outputs, labels)
        hits, samples = hits + int((outputs.argmax(1) == labels).sum()), samples + size
    assert len(made) < 40 * 15
    assert running.reduced()["acc"] == pytest.approx(hits / samples)


def test_labels_with_a_graph_wait_as_others_do():
    outputs, scale = torch.randn(4, 1, generator=torch.Generator().manual_seed(0)).sigmoid(), torch.ones(())
    scale.requires_grad_(True)
    running, plain = tally(Accuracy()), tally(Accuracy())
    for _ in range(3):
        running.update(None, 4, outputs, torch.tensor([[0.0], [1.0], [1.0], [0.0]]) * scale)
        plain.update(None, 4, outputs, torch.tensor([[0.0], [1.0], [1.0], [0.0]]))
    assert running.reduced() == plain.reduced()


@pytest.mark.parametrize("batches", [255, 256, 257, 511, 512, 513, 1000])
@pytest.mark.parametrize("first", [0, 123, 254])
def test_of_many_losses_the_first_is_told(batches, first):
    running = tally()
    for number in range(batches):
        if number % 7 == 6:
            running.miss()
        else:
            running.update(torch.tensor(math.nan if number in (first, batches - 1) else 1.0), 1, None, None)
    assert running.take_nonfinite() == batches - 1 - first
    assert running.take_nonfinite() is None


def test_of_many_losses_none_is_lost():
    running, weights = tally(), [1 + number % 5 for number in range(1000)]
    for number, weight in enumerate(weights):
        running.update(torch.tensor(float(number)), weight if number % 2 else torch.tensor(weight), None, None)
        if number % 100 == 99:
            assert running.take_nonfinite() is None
    mean = sum(number * weight for number, weight in enumerate(weights)) / sum(weights)
    assert running.reduced()["loss"] == mean


def test_losses_of_different_precision_are_looked_at_together():
    running = tally()
    running.update(torch.tensor(1.0, dtype=torch.float16), 1, None, None)
    running.update(torch.tensor(math.inf, dtype=torch.bfloat16), 1, None, None)
    assert running.take_nonfinite() == 0


# -------------------------------------------------------------------------------------------------- saving


def metrics():
    return [Accuracy(topk=(1, 2)), Auc(), as_metric(distance)]


def distance(outputs, labels):
    return outputs[:, 1]


def feed(target, count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        outputs, labels = torch.randn(5, 2, generator=generator), torch.randint(0, 2, (5,), generator=generator)
        target.update(outputs.mean(), 5, outputs, labels)


@pytest.mark.parametrize("updates", [0, 3])
def test_a_pass_goes_on_from_a_safely_loaded_state_to_the_same_bits(updates):
    whole, first, second = (Tally(metrics(), CPU) for _ in range(3))
    feed(whole, updates, seed=1)
    feed(first, updates, seed=1)
    file = io.BytesIO()
    torch.save(first.state(), file)
    file.seek(0)
    second.go_on_from([torch.load(file, weights_only=True)])
    feed(whole, 2, seed=2)
    feed(second, 2, seed=2)
    assert second.reduced() == whole.reduced()


def test_what_was_saved_does_not_go_on():
    running = Tally(metrics(), CPU)
    feed(running, 2, seed=1)
    saved, before = running.state(), running.reduced()
    feed(running, 2, seed=2)
    again = Tally(metrics(), CPU)
    again.go_on_from([saved])
    assert again.reduced() == before
    feed(again, 1, seed=3)  # nor does loading tie the two
    third = Tally(metrics(), CPU)
    third.go_on_from([saved])
    assert third.reduced() == before


def test_a_state_of_other_metrics_is_refused():
    with pytest.raises(ValueError, match="Prepare the model with the metrics that it was trained with"):
        tally(Accuracy()).go_on_from([tally().state()])


def test_an_accuracy_whose_update_was_exchanged_gets_each_batch():
    metric, sizes = Accuracy(), []
    metric.update = lambda outputs, labels: sizes.append(len(labels))
    running = tally(metric)
    for size in (4, 4, 4, 3):
        running.update(torch.tensor(0.0), size, torch.zeros(size, 3), torch.zeros(size, dtype=torch.int64))
    assert running.metrics and sizes == [4, 4, 4, 3]
