"""ProgBarLogger in a real notebook kernel: widgets, and one line an epoch that stays."""

import pytest

pytest.importorskip("ipykernel")
pytest.importorskip("ipywidgets")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

FIT = """
import torch, hapi
x, y = torch.rand(640, 4), torch.randint(3, (640,))
model = hapi.Model(torch.nn.Linear(4, 3)).prepare("sgd", torch.nn.CrossEntropyLoss(), hapi.metrics.Accuracy())
history = model.fit((x, y), (x, y), epochs=2, batch_size=8)
"""
PLOT = "history.plot()"


@pytest.mark.slow
def test_a_fit_and_its_plot(monkeypatch):
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (FIT, PLOT)])
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    fit, plot = (cell.outputs for cell in notebook.cells)
    text = "".join(output.text for output in fit if output.output_type == "stream" and output.name == "stdout")
    assert [line.split(" - ")[0] for line in text.splitlines()[1:]] == ["Epoch 1/2", "Epoch 2/2"]
    assert all("val_acc" in line and line.endswith(" samples/s") for line in text.splitlines()[1:])
    states = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    widgets = [each["state"] for each in states]
    bars = [each for each in widgets if each["_model_name"] == "FloatProgressModel"]
    assert [(each["value"], each["max"]) for each in bars] == [(80, 80)] * 4
    values = [each["value"] for each in widgets if each["_model_name"] == "HTMLModel" and "loss" in each["value"]]
    assert len(values) == 4 and all("80/80" in value and "acc" in value for value in values)
    assert not any("\u2588" in value for value in values)  # the widget is the bar
    assert [output.data["image/png"][:4] for output in plot if "image/png" in output.get("data", {})] == ["iVBO"]
