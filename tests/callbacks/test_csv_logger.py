"""CSVLogger: the file after each epoch, appended, resumed, with late columns."""

from callback_fakes import fit

from hapi.callbacks import Callback, CSVLogger, csv_logger

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
