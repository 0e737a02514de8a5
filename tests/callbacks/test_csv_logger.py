"""CSVLogger: the file after each epoch, appended, resumed, with late columns."""

import pytest
import torch
from callback_fakes import fit

import hapi
from hapi.callbacks import Callback, CSVLogger, ModelCheckpoint, csv_logger

ROWS = [{"loss": 3.0, "acc": 0.5}, {"loss": 2.0, "acc": 0.75}]


def test_a_row_an_epoch(tmp_path):
    path = tmp_path / "new folder" / "log.csv"
    fit([CSVLogger(path)], ROWS)
    assert path.read_text() == "epoch,loss,acc\n1,3.0,0.5\n2,2.0,0.75\n"
    assert [child.name for child in path.parent.iterdir()] == ["log.csv"]


def test_the_row_is_on_disk_when_the_epoch_ends(tmp_path):
    seen = []

    class Reader(Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((tmp_path / "log.csv").read_text().count("\n"))

    fit([CSVLogger(str(tmp_path / "log.csv")), Reader()], ROWS)
    assert seen == [2, 3]


def test_separator(tmp_path):
    fit([CSVLogger(tmp_path / "log.tsv", separator="\t")], ROWS[:1])
    assert (tmp_path / "log.tsv").read_text() == "epoch\tloss\tacc\n1\t3.0\t0.5\n"


def test_columns_are_the_announced_names_also_where_an_epoch_lacks_a_value(tmp_path):
    rows = [{"loss": 3.0}, {"loss": 2.0, "val_loss": 4.0}, {"loss": 1.0}]
    fit([CSVLogger(tmp_path / "log.csv")], rows, metrics=["loss", "val_loss"])
    assert (tmp_path / "log.csv").read_text() == "epoch,loss,val_loss\n1,3.0,\n2,2.0,4.0\n3,1.0,\n"


def test_a_column_that_nobody_announced(tmp_path):
    rows = [{"loss": 3.0}, {"loss": 2.0, "surprise": 4.0}, {"loss": 1.0, "surprise": 5.0}]
    fit([CSVLogger(tmp_path / "log.csv")], rows, metrics=["loss"])
    assert (tmp_path / "log.csv").read_text() == "epoch,loss,surprise\n1,3.0,\n2,2.0,4.0\n3,1.0,5.0\n"


def test_a_new_fit_starts_a_new_file_unless_it_appends(tmp_path):
    path = tmp_path / "log.csv"
    fit([CSVLogger(path)], ROWS)
    fit([CSVLogger(path, append=True)], [{"loss": 1.0, "f1": 0.5}])
    assert path.read_text() == "epoch,loss,acc,f1\n1,3.0,0.5,\n2,2.0,0.75,\n1,1.0,,0.5\n"
    fit([CSVLogger(path)], ROWS[:1])
    assert path.read_text() == "epoch,loss,acc\n1,3.0,0.5\n"


def test_a_fit_that_fails_before_an_epoch_ends_leaves_the_file(tmp_path):
    path = tmp_path / "log.csv"
    fit([CSVLogger(path)], ROWS)
    fit([CSVLogger(path)], [])
    assert path.read_text().count("\n") == 3


def test_one_object_for_two_fits(tmp_path):
    logger = CSVLogger(tmp_path / "log.csv")
    fit([logger], ROWS)
    fit([logger], [{"mae": 1.0}], first_epoch=2)
    assert (tmp_path / "log.csv").read_text() == "epoch,mae\n3,1.0\n"


def test_a_resumed_fit_replaces_the_epochs_that_it_trains_again(tmp_path):
    path = tmp_path / "log.csv"
    state = fit([CSVLogger(path)], ROWS).callbacks.state_dict()
    fit([CSVLogger(path, append=True)], [{"loss": 1.0, "acc": 1.0}], first_epoch=2)  # written after the checkpoint
    assert path.read_text().count("\n") == 4
    fit([CSVLogger(path)], [{"loss": 9.0, "acc": 0.0}, {"loss": 8.0, "acc": 0.0}], first_epoch=2, state=state)
    assert path.read_text() == "epoch,loss,acc\n1,3.0,0.5\n2,2.0,0.75\n3,9.0,0.0\n4,8.0,0.0\n"


@pytest.mark.parametrize("saved_after", [0, 1])
def test_a_resumed_fit_leaves_the_rows_of_earlier_runs(tmp_path, saved_after):
    path = tmp_path / "log.csv"
    fit([CSVLogger(path)], ROWS)
    state = fit([CSVLogger(path, append=True)], ROWS[:saved_after]).callbacks.state_dict()
    rows = [{"loss": 1.0, "acc": 1.0}, {"loss": 9.0, "acc": 9.0}]
    fit([CSVLogger(path, append=True)], rows[saved_after:], first_epoch=saved_after)  # written after the checkpoint
    fit([CSVLogger(path, append=True)], rows[saved_after:], first_epoch=saved_after, state=state)
    own = "1,1.0,1.0\n" if saved_after == 0 else "1,3.0,0.5\n"
    assert path.read_text() == f"epoch,loss,acc\n1,3.0,0.5\n2,2.0,0.75\n{own}2,9.0,9.0\n"


def test_a_row_that_was_torn_is_left_out(tmp_path):
    path = tmp_path / "log.csv"
    state = fit([CSVLogger(path)], ROWS).callbacks.state_dict()
    path.write_text(path.read_text() + "1")  # of "12,...", say
    fit([CSVLogger(path)], ROWS[:1], first_epoch=2, state=state)
    assert path.read_text() == "epoch,loss,acc\n1,3.0,0.5\n2,2.0,0.75\n3,3.0,0.5\n"
    path.write_text("epo")
    fit([CSVLogger(path, append=True)], ROWS[:1])
    assert path.read_text() == "epoch,loss,acc\n1,3.0,0.5\n"


@pytest.mark.parametrize("cut", range(1, 13))
def test_a_whole_row_whose_end_an_editor_has_taken_away_stays(tmp_path, cut):
    """The last line is "2,2.0,0.75" with "\\r\\n": what is cut off decides what is left of it."""
    path = tmp_path / "log.csv"
    for resumed in (False, True):
        state = fit([CSVLogger(path)], ROWS).callbacks.state_dict()
        path.write_bytes(path.read_bytes()[:-cut])
        last = "2,2.0,0.75"[: 12 - cut]
        kept = f"{last}\n" if last.count(",") == 2 else ""  # two bytes end a line: less than a row's cells are no row
        logger = CSVLogger(path, append=not resumed)
        fit([logger], [{"loss": 1.0, "acc": 1.0}], first_epoch=2, state=state if resumed else None)
        assert path.read_text() == f"epoch,loss,acc\n1,3.0,0.5\n{kept}3,1.0,1.0\n"
    # One that is trained again is replaced, whole or not.
    state = fit([CSVLogger(path)], ROWS[:1]).callbacks.state_dict()
    fit([CSVLogger(path, append=True)], ROWS[1:], first_epoch=1)
    path.write_bytes(path.read_bytes()[:-cut])
    fit([CSVLogger(path)], [{"loss": 1.0, "acc": 1.0}], first_epoch=1, state=state)
    assert path.read_text() == "epoch,loss,acc\n1,3.0,0.5\n2,1.0,1.0\n"


def test_a_resumed_fit_with_columns_that_come_later(tmp_path):
    path = tmp_path / "log.csv"
    state = fit([CSVLogger(path)], ROWS).callbacks.state_dict()
    rows = [{"loss": 1.0, "acc": 1.0, "val_loss": 5.0}, {"loss": 0.5, "acc": 1.0, "extra": 7.0}]
    fit([CSVLogger(path)], rows, first_epoch=1, state=state, metrics=["loss", "acc", "val_loss"])
    assert path.read_text() == "epoch,loss,acc,val_loss,extra\n1,3.0,0.5,,\n2,1.0,1.0,5.0,\n3,0.5,1.0,,7.0\n"


@pytest.mark.parametrize("text", ["name,value\na,1\n", "epoch;loss\n1;2.0\n"])
def test_a_file_that_is_no_log_is_left_as_it_is(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"there is no epoch, so it is another table.*a path of its own"):
        fit([CSVLogger(path, append=True)], ROWS)
    assert path.read_text() == text


def test_a_resumed_fit_whose_file_is_gone(tmp_path):
    path = tmp_path / "log.csv"
    state = fit([CSVLogger(path)], ROWS).callbacks.state_dict()
    path.unlink()
    fit([CSVLogger(path)], ROWS[:1], first_epoch=2, state=state)
    assert path.read_text() == "epoch,loss,acc\n3,3.0,0.5\n"


def test_rank_1_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_logger, "get_rank", lambda: 1)
    fit([CSVLogger(tmp_path / "log.csv")], ROWS)
    assert list(tmp_path.iterdir()) == []


class StopAt(Callback):
    """Ends the run as a fault does, after so many steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, step, logs=None):
        if self.model.steps_trained == self.steps:
            raise RuntimeError("a fault")


@pytest.mark.parametrize("append", [False, True])
def test_a_run_that_was_cut_ends_with_the_table_of_one_that_was_not(tmp_path, append):
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))

    def train(name, *callbacks, **options):
        torch.manual_seed(0)
        model = hapi.Model(torch.nn.Linear(3, 1)).prepare("adam", torch.nn.MSELoss())
        callbacks = [CSVLogger(tmp_path / f"{name}.csv", append=append), *callbacks]
        data = (x, x.sum(1, keepdim=True))
        options |= {"save_dir": tmp_path / name, "callbacks": callbacks, "seed": 3, "verbose": 0}
        model.fit(data, data, batch_size=4, epochs=4, eval_freq=2, **options)

    train("straight")
    with pytest.raises(RuntimeError, match="a fault"):
        train("cut", StopAt(13), ModelCheckpoint(every_n_steps=4))
    assert (tmp_path / "cut.csv").read_text().count("\n") == 3
    train("cut", resume=True)
    assert (tmp_path / "cut.csv").read_text() == (tmp_path / "straight.csv").read_text()


def test_rows_of_an_earlier_fit_stay_where_the_next_one_is_resumed_from_its_first_epoch(tmp_path):
    path = tmp_path / "log.csv"
    fit([CSVLogger(path)], ROWS)
    state = fit([CSVLogger(path, append=True)], []).callbacks.state_dict()  # cut before its first row
    fit([CSVLogger(path, append=True)], [{"loss": 7.0, "acc": 0.0}])  # ... or after it
    again = fit([CSVLogger(path, append=True)], [{"loss": 1.0, "acc": 1.0}], state=state).callbacks.state_dict()
    assert path.read_text() == "epoch,loss,acc\n1,3.0,0.5\n2,2.0,0.75\n1,1.0,1.0\n"
    fit([CSVLogger(path, append=True)], [{"loss": 0.5, "acc": 1.0}], state=again)
    assert path.read_text() == "epoch,loss,acc\n1,3.0,0.5\n2,2.0,0.75\n1,0.5,1.0\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"epoch,loss\n1,2,3\n", r"row 1 begins with '1' and has 3 of 2 cells"),
        (b"epoch,loss\nx,2\n", r"row 1 begins with 'x'.*no epoch's number"),
        (b"loss,epoch\n1\n", r"row 1 begins with '1' and has 1 of 2 cells"),
        (b"epoch,loss\n1,\xe9\n", r"cannot be read .*another file"),
    ],
)
def test_a_file_that_cannot_be_gone_on_with_is_refused_before_the_first_epoch(tmp_path, content, message):
    path = tmp_path / "log.csv"
    state = fit([CSVLogger(path)], ROWS).callbacks.state_dict()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message + r".*a path of its own"):
        fit([CSVLogger(path)], [], state=state)
    assert path.read_bytes() == content


def test_epochs_that_a_table_program_has_written_as_fractions(tmp_path):
    path = tmp_path / "log.csv"
    state = fit([CSVLogger(path)], ROWS).callbacks.state_dict()
    path.write_text("epoch,loss\n1.0,3.0\n2.0,2.0\n")
    fit([CSVLogger(path)], [{"loss": 9.0}], first_epoch=1, state=state)
    assert path.read_text() == "epoch,loss\n1.0,3.0\n2,9.0\n"


@pytest.mark.parametrize("name", [".", "folder", "file/log.csv"])
def test_a_place_where_no_file_can_be_is_refused_before_the_first_epoch(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"CSVLogger received path=.*nothing can be written: .* is a f.*Write a path"):
        fit([CSVLogger(name)], [])


@pytest.mark.parametrize("separator", ["", "::", "\n", "\r", '"'])
def test_what_cannot_stand_between_two_columns(separator):
    with pytest.raises(ValueError, match=r"received separator=.*one character.*Write separator"):
        CSVLogger("log.csv", separator=separator)
