"""Accuracy, Precision, Recall, F1: closed-form numbers, each form of a batch, each option."""

import math

import pytest
import torch

from hapi.metrics import F1, Accuracy, Precision, Recall

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 2.0], [5.0, 1.0, 2.0]])  # predicts 0 1 2 0


def value(metric, *batches):
    for outputs, labels in batches:
        metric.update(outputs, labels)
    return metric.compute()


# -------------------------------------------------------------------------------------------------- Accuracy


def test_accuracy_over_uneven_batches_is_that_of_all_samples():
    assert value(Accuracy(), (LOGITS[:3], torch.tensor([0, 1, 0])), (LOGITS[3:], torch.tensor([1]))) == 2 / 4


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0, 1, 1, 0]),
        torch.tensor([0, 1, 1, 0]).int(),
        torch.tensor([0.0, 1.0, 1.0, 0.0]),
        torch.tensor([[0], [1], [1], [0]]),
        torch.nn.functional.one_hot(torch.tensor([0, 1, 1, 0]), 3),
        torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.8, 0.1], [0.8, 0.1, 0.1]]),
    ],
    ids=["int64", "int32", "float numbers", "column", "one-hot", "probabilities"],
)
def test_accuracy_takes_labels_as_numbers_one_hot_and_probabilities(labels):
    assert value(Accuracy(), (LOGITS, labels)) == 0.75


def test_accuracy_of_predicted_class_numbers():
    assert value(Accuracy(), (torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 2, 3]))) == 0.75


def test_accuracy_of_a_segmentation_leaves_ignored_pixels_out():
    outputs = torch.zeros(1, 3, 2, 2)
    outputs[0, 1] = 1.0  # class 1 everywhere
    labels = torch.tensor([[[1, 1], [2, -100]]])
    assert value(Accuracy(), (outputs, labels)) == pytest.approx(2 / 3, abs=1e-15)
    assert value(Accuracy(), (outputs, labels.unsqueeze(1))) == pytest.approx(2 / 3, abs=1e-15)
    assert value(Accuracy(ignore_index=None), (outputs, labels)) == 0.5


def test_an_ignored_label_that_is_a_class_number_is_left_out_where_it_is_predicted_too():
    labels = torch.tensor([0, 1, 0, 0])
    assert value(Accuracy(ignore_index=0), (LOGITS, labels)) == 1.0
    assert value(Accuracy(topk=(1, 2), ignore_index=0), (LOGITS, labels)) == {"acc_top1": 1.0, "acc_top2": 1.0}
    assert value(Accuracy(ignore_index=0), (LOGITS.argmax(1), labels)) == 1.0


def test_accuracy_of_nothing_but_ignored_labels_is_nan():
    assert math.isnan(value(Accuracy(), (LOGITS, torch.full((4,), -100))))
    assert math.isnan(Accuracy().compute())


@pytest.mark.parametrize("shape", [(4,), (4, 1)], ids=["flat", "column"])
@pytest.mark.parametrize("label_shape", [(4,), (4, 1)], ids=["flat labels", "column labels"])
def test_accuracy_of_one_column_of_probabilities(shape, label_shape):
    outputs = torch.tensor([0.9, 0.4, 0.5, 0.1])  # predicts 1 0 1 0
    labels = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert value(Accuracy(), (outputs.view(shape), labels.view(label_shape))) == 0.75


def test_one_column_is_logits_once_an_output_leaves_0_to_1_anywhere_in_the_pass():
    first = torch.tensor([0.2, 0.7]), torch.tensor([1, 1])
    second = torch.tensor([-1.0, 3.0]), torch.tensor([0, 1])
    metric = Accuracy()
    assert value(metric, first) == 0.5  # so far they may be probabilities
    assert value(metric, second) == 1.0
    assert value(Accuracy(), second, first) == 1.0


def test_a_segmentation_of_one_column():
    outputs = torch.tensor([0.9, 0.4, 0.5, 0.1]).view(1, 1, 2, 2)
    labels = torch.tensor([1, 1, 1, 0]).view(1, 2, 2)
    assert value(Accuracy(), (outputs, labels)) == 0.75
    assert value(Accuracy(), (outputs, labels.unsqueeze(1))) == 0.75
    assert value(Recall(), (outputs, labels)) == pytest.approx(2 / 3)


def test_a_threshold_decides_what_one_column_means():
    batch = torch.tensor([0.2, 0.7, 0.4]), torch.tensor([1, 1, 0])
    assert value(Accuracy(threshold=0.0), batch) == pytest.approx(2 / 3)
    assert value(Accuracy(threshold=0.3), batch) == pytest.approx(1 / 3)


def test_one_column_takes_booleans_and_leaves_ignored_labels_out():
    outputs = torch.tensor([0.9, 0.1, 0.8])
    assert value(Accuracy(), (outputs, torch.tensor([True, False, False]))) == pytest.approx(2 / 3)
    assert value(Accuracy(), (outputs, torch.tensor([1, -100, 0]))) == 0.5


@pytest.mark.parametrize("ignored", [-100, -1, 255])
def test_predictions_padded_as_the_labels_are(ignored):
    preds, labels = torch.tensor([[1, 2, -9, -9]]), torch.tensor([[1, 0, -9, -9]])
    padded = preds.masked_fill(preds == -9, ignored), labels.masked_fill(labels == -9, ignored)
    assert value(Accuracy(ignore_index=ignored), padded) == 0.5
    assert value(Accuracy(ignore_index=ignored), (preds[:, :2], labels[:, :2]), padded) == 0.5
    assert value(Accuracy(ignore_index=None), padded) == 0.75


@pytest.mark.parametrize("padding", [-1.0, 2.0, math.nan, math.inf, -math.inf])
def test_padding_does_not_tell_what_one_column_holds(padding):
    labels = torch.tensor([1, 0, 0, 0, -100])
    probabilities = torch.tensor([0.9, 0.1, 0.2, 0.6, padding])
    logits = torch.tensor([2.0, -2.0, -1.0, 0.4, padding])  # 0.4 is above 0 and below 0.5
    assert value(Accuracy(), (probabilities, labels)) == 0.75
    assert value(Accuracy(), (logits, labels)) == 0.75
    assert value(Precision(), (probabilities, labels)) == value(Precision(), (logits, labels)) == 0.5
    ignored = probabilities[4:], labels[4:]
    assert value(Accuracy(), ignored, (probabilities, labels)) == value(Accuracy(), ignored, (logits, labels)) == 0.75


def test_topk_as_a_number_and_as_several():
    labels = torch.tensor([1, 1, 0, 2])  # found at place 2, 1, 3, 2
    assert value(Accuracy(topk=2), (LOGITS, labels)) == 0.75
    assert value(Accuracy(topk=(1, 2, 3)), (LOGITS, labels)) == {"acc_top1": 0.25, "acc_top2": 0.75, "acc_top3": 1.0}
    assert Accuracy(topk=(1, 5)).names == ["acc_top1", "acc_top5"]
    assert Accuracy(topk=2).names == ["acc_top2"]
    assert Accuracy(topk=1).names == ["acc"]
    assert Accuracy(topk=(1, 5), name="a").names == ["a_top1", "a_top5"]


def test_topk_of_a_segmentation():
    outputs = LOGITS.T.reshape(1, 3, 2, 2)
    labels = torch.tensor([1, 1, 0, -100]).reshape(1, 2, 2)
    expected = {"acc_top1": pytest.approx(1 / 3), "acc_top2": pytest.approx(2 / 3)}
    assert value(Accuracy(topk=(1, 2)), (outputs, labels)) == expected


def test_topk_beyond_the_classes():
    with pytest.raises(ValueError, match="Write a topk of at most 3"):
        Accuracy(topk=(1, 5)).update(LOGITS, torch.zeros(4).long())
    with pytest.raises(ValueError, match=r"no further classes.*Write Accuracy\(\)"):
        Accuracy(topk=2).update(torch.rand(4), torch.ones(4))


@pytest.mark.parametrize("topk", [0, (), (1, -2), 1.5, True, (1, 1), "1"])
def test_a_wrong_topk(topk):
    wrong_kind = topk in (1.5, "1") or topk is True
    with pytest.raises(
        TypeError if wrong_kind else ValueError, match=r"Accuracy received topk=.*Write topk=1"
    ) as caught:
        Accuracy(topk=topk)
    assert ("none of them twice" in str(caught.value)) == (topk in ((), (1, 1)))


@pytest.mark.parametrize("metric", [Accuracy(), Precision(num_classes=3)], ids=["Accuracy", "Precision"])
@pytest.mark.parametrize(
    ("outputs", "labels"),
    [((4, 3), (3,)), ((4, 3), (4, 2)), ((4, 3, 2, 2), (4, 2)), ((4,), (3,)), ((4, 7, 3), (4, 7))],
)
def test_shapes_that_do_not_fit(metric, outputs, labels):
    with pytest.raises(ValueError, match=r"do not fit each other. Write a subclass whose update reshapes them"):
        metric.update(torch.rand(outputs), torch.zeros(labels).long())


@pytest.mark.parametrize(
    ("outputs", "labels", "what"),
    [
        ((LOGITS, LOGITS), torch.zeros(4), "outputs of type tuple"),
        ({"logits": LOGITS}, torch.zeros(4), "outputs of type dict"),
        (LOGITS, (torch.zeros(4), torch.zeros(4)), "labels of type tuple"),
        ({"logits": LOGITS}, torch.zeros(4), r"outputs of type dict.*super\(\).update\(outputs\['logits'\], labels\)"),
    ],
)
def test_several_outputs_or_labels_ask_for_a_subclass(outputs, labels, what):
    with pytest.raises(TypeError, match=rf"(?=.*Write a subclass whose update picks it: class MyAccuracy).*{what}"):
        Accuracy().update(outputs, labels)


def test_no_labels_ask_for_their_place():
    class Own(Accuracy):
        pass

    with pytest.raises(TypeError, match=r"Own \('acc'\) received no labels.*labels=1 for tuples"):
        Own().update(LOGITS, None)


def test_an_empty_batch_changes_nothing():
    metric = Accuracy()
    metric.update(torch.empty(0, 3), torch.empty(0).long())
    metric.update(torch.empty(0), torch.empty(0))
    assert math.isnan(metric.compute())
    assert value(metric, (LOGITS, torch.tensor([0, 1, 1, 0]))) == 0.75


def test_counts_beyond_float32_are_exact():
    metric = Accuracy()
    metric.counted, metric.hits = torch.tensor(2**24 + 2), torch.tensor([2**24 + 1])
    assert metric.compute() == (2**24 + 1) / (2**24 + 2)


def test_half_precision_and_inference_mode():
    metric = Accuracy()
    with torch.inference_mode():
        metric.update(LOGITS.bfloat16(), torch.tensor([0, 1, 1, 0]))
        metric.update(torch.tensor([0.9, 0.2]).half(), torch.tensor([1, 0]))
    metric.update(LOGITS.half(), torch.tensor([0, 1, 1, 0]))
    metric.update(torch.tensor([0.9, 0.2]), torch.tensor([1, 0]))
    assert metric.compute() == 10 / 12


def test_update_and_result_read_nothing_from_the_device(monkeypatch):
    reads = []
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append("item"))
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: reads.append("float"))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: reads.append("bool"))
    for metric in (Accuracy(), Accuracy(topk=(1, 2)), Precision(num_classes=3), F1(num_classes=3, average="micro")):
        metric.update(LOGITS, torch.tensor([0, 1, -100, 0]))
        metric.values()
    for metric in (Accuracy(), Recall(), F1(threshold=0.4)):
        metric.update(torch.rand(4), torch.tensor([0, 1, -100, 0]))
        metric.values()
    assert reads == []


# -------------------------------------------------------------------------- Precision, Recall, F1: two classes

SCORES = torch.tensor([0.9, 0.8, 0.3, 0.6, 0.1])  # predicts 1 1 0 1 0
TRUTH = torch.tensor([1, 0, 1, 1, 0])  # 2 true positives, 1 false one, 1 missed


@pytest.mark.parametrize(("cls", "expected"), [(Precision, 2 / 3), (Recall, 2 / 3), (F1, 2 / 3)])
@pytest.mark.parametrize(
    "outputs",
    [SCORES, SCORES[:, None], SCORES.logit(), torch.stack([1 - SCORES, SCORES], 1), (SCORES > 0.5).long()],
    ids=["flat", "column", "logits", "two columns", "class numbers"],
)
def test_two_classes(cls, expected, outputs):
    assert value(cls(), (outputs[:2], TRUTH[:2]), (outputs[2:], TRUTH[2:])) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("ignored", [-100, 255])
def test_two_classes_of_predictions_padded_as_the_labels_are(ignored):
    # 1 true positive, 1 missed, 4 rightly of class 0.
    labels, preds = torch.tensor([[1, 0, 0, -9], [0, 1, 0, -9]]), torch.tensor([[1, 0, 0, -9], [0, 0, 0, -9]])
    padded = preds.masked_fill(preds == -9, ignored), labels.masked_fill(labels == -9, ignored)
    assert value(Precision(ignore_index=ignored), padded) == 1.0
    assert value(Recall(ignore_index=ignored), padded) == 0.5
    assert value(F1(ignore_index=ignored), padded) == pytest.approx(2 / 3, abs=1e-15)


def test_precision_and_recall_move_apart_with_the_threshold():
    # From 0.25 on: 4 predicted, 3 of them right, none missed. From 0.85 on: 1 predicted and right, 2 missed.
    for outputs in (SCORES, torch.stack([1 - SCORES, SCORES], 1)):
        assert value(Precision(threshold=0.25), (outputs, TRUTH)) == 0.75
        assert value(Recall(threshold=0.25), (outputs, TRUTH)) == 1.0
        assert value(Precision(threshold=0.85), (outputs, TRUTH)) == 1.0
        assert value(Recall(threshold=0.85), (outputs, TRUTH)) == pytest.approx(1 / 3)
        assert value(F1(threshold=0.25), (outputs, TRUTH)) == pytest.approx(6 / 7)


def test_the_threshold_itself_counts_as_class_1():
    assert value(Recall(), (torch.tensor([0.5]), torch.tensor([1]))) == 1.0
    assert value(Recall(), (torch.tensor([0.0, -1.0]), torch.tensor([1, 0]))) == 1.0


def test_nothing_predicted_and_nothing_there_give_zero():
    nothing = torch.tensor([0.1, 0.2]), torch.tensor([0, 0])
    assert [value(cls(), nothing) for cls in (Precision, Recall, F1)] == [0.0, 0.0, 0.0]
    assert [cls().compute() for cls in (Precision, Recall, F1)] == [0.0, 0.0, 0.0]


def test_names_of_the_rates():
    assert [cls().name for cls in (Precision, Recall, F1)] == ["precision", "recall", "f1"]
    assert Precision("p").name == "p"


# ------------------------------------------------------------------------------------------- several classes

# label, prediction: (0, 0) twice, (0, 1), (1, 1), (2, 0), (2, 2)
CLASS_LABELS = torch.tensor([0, 0, 0, 1, 2, 2])
CLASS_OUTPUTS = torch.nn.functional.one_hot(torch.tensor([0, 0, 1, 1, 0, 2]), 4).float()  # class 3 never occurs


@pytest.mark.parametrize(
    ("cls", "macro"),
    [
        (Precision, (2 / 3 + 1 / 2 + 1) / 3),
        (Recall, (2 / 3 + 1 + 1 / 2) / 3),
        (F1, (4 / 6 + 2 / 3 + 2 / 3) / 3),
    ],
)
def test_several_classes(cls, macro):
    batch = CLASS_OUTPUTS, CLASS_LABELS
    assert value(cls(num_classes=4), batch) == pytest.approx(macro, abs=1e-15)
    assert value(cls(num_classes=4, average="micro"), batch) == pytest.approx(4 / 6, abs=1e-15)
    assert value(cls(num_classes=4), (CLASS_OUTPUTS.argmax(1), CLASS_LABELS)) == pytest.approx(macro, abs=1e-15)


def test_several_classes_leave_ignored_labels_out():
    outputs = torch.cat([CLASS_OUTPUTS, CLASS_OUTPUTS[:2]])
    labels = torch.cat([CLASS_LABELS, torch.tensor([-100, -100])])
    clean = value(F1(num_classes=4), (CLASS_OUTPUTS, CLASS_LABELS))
    assert value(F1(num_classes=4), (outputs, labels)) == clean
    assert value(F1(num_classes=4, ignore_index=255), (outputs, labels.masked_fill(labels == -100, 255))) == clean


@pytest.mark.parametrize("ignored", [-100, 255])
@pytest.mark.parametrize("average", ["macro", "weighted", "micro"])
def test_several_classes_leave_out_what_is_predicted_at_ignored_labels(average, ignored):
    preds, more = CLASS_OUTPUTS.argmax(1), torch.full((3,), ignored)
    padded = torch.cat([preds, more]), torch.cat([CLASS_LABELS, more])
    options = {"num_classes": 4, "average": average, "ignore_index": ignored}
    clean = value(F1(**options), (preds, CLASS_LABELS))
    assert value(F1(**options), padded) == clean  # in the first batch, which is looked at
    assert value(F1(**options), (preds, CLASS_LABELS), padded) == clean
    with pytest.raises(ValueError, match="received outputs from"):
        F1(**options).update(padded[0], padded[1].masked_fill(padded[1] == ignored, 1))


def test_a_class_that_is_never_predicted_counts_as_zero_if_it_occurs():
    outputs = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert value(Precision(num_classes=3), (outputs, torch.tensor([0, 1]))) == 0.25


def test_pixels_of_several_classes():
    outputs = CLASS_OUTPUTS.T.reshape(1, 4, 2, 3)
    flat = value(Recall(num_classes=4), (CLASS_OUTPUTS, CLASS_LABELS))
    assert value(Recall(num_classes=4), (outputs, CLASS_LABELS.reshape(1, 2, 3))) == flat


def test_wrong_options_and_batches_of_the_rates():
    with pytest.raises(ValueError, match='average="macro"'):
        Precision(average="binary")
    with pytest.raises(ValueError, match="Leave num_classes out"):
        Recall(num_classes=1)
    with pytest.raises(ValueError, match=r"Write F1\(num_classes=3\)"):
        F1().update(LOGITS, torch.zeros(4).long())
    with pytest.raises(ValueError, match="Write num_classes=3"):
        F1(num_classes=5).update(LOGITS, torch.zeros(4).long())
    with pytest.raises(ValueError, match=r"tells two classes apart. Leave num_classes out"):
        F1(num_classes=3).update(torch.rand(4), torch.zeros(4).long())
