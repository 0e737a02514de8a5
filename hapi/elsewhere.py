"""Names that users bring from elsewhere, or misspell: what takes their place here. Read only to word an error."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

# Of the package `hapi` and those in it: from Paddle, Keras, Lightning, Accelerate.
_OF_HAPI = {
    "InputSpec": "Shapes are seen in the first batch: write hapi.Model(network), and for a table of them "
    "model.summary(input_size=(1, 28, 28)).",
    "summary": "Write hapi.Model(network).summary(input_size=(1, 28, 28)).",
    "to_tensor": "Write torch.tensor(values).",
    "Tensor": "Write torch.Tensor.",
    "no_grad": "Write torch.no_grad().",
    "nn": "Write torch.nn.",
    "layers": "Write torch.nn.",
    "losses": "Write torch.nn, such as torch.nn.CrossEntropyLoss().",
    "optimizer": 'Write torch.optim, or prepare("adam", ...).',
    "optim": 'Write torch.optim, or prepare("adam", ...).',
    "vision": "Data sets are in hapi.datasets, transforms and networks in torchvision.",
    "io": "Write torch.utils.data.",
    "DataLoader": "Write torch.utils.data.DataLoader.",
    "Sequential": "Write hapi.Model(torch.nn.Sequential(...)).",
    "Trainer": "Write hapi.Model(network).prepare(optimizer, loss).fit(data); what a trainer is told there (devices, "
    "strategy) the launcher says here.",
    "Accelerator": "Write hapi.Model(network).prepare(optimizer, loss).fit(data), or for a loop of your own "
    "hapi.distributed.DataParallel(network).",
    "LightningModule": "Any torch.nn.Module will do: hapi.Model(network). For a step of your own subclass hapi.Model.",
    "LightningDataModule": "Any DataLoader or data set will do: model.fit(train_data, eval_data).",
    "Module": "Write torch.nn.Module, and hapi.Model(network) to train it.",
    "Metric": "Write hapi.metrics.Metric.",
    "Callback": "Write hapi.callbacks.Callback.",
    "set_seed": "Write hapi.seed(0).",
    "seed_everything": "Write hapi.seed(0).",
    "manual_seed": "Write hapi.seed(0), or torch.manual_seed(0).",
    "save": 'Write model.save("checkpoints/mnist").',
    "load": 'Write model.load("checkpoints/mnist").',
    "fit": "Write hapi.Model(network).prepare(optimizer, loss).fit(data).",
    "launch": "Write hapirun on the command line, or hapi.distributed.spawn(function).",
    "DataParallel": "Write hapi.distributed.DataParallel(network); a Model needs none.",
}
_FIND_LR = "Write hapi.find_lr(model, data)."
_OF_CALLBACKS = {
    "VisualDL": "Write hapi.callbacks.TensorBoard.",
    "WandbLogger": "Write hapi.callbacks.WandbCallback.",
    "LearningRateScheduler": "Write hapi.callbacks.LRScheduler.",
    "TerminateOnNaN": 'Write fit(nan_policy="stop"), which is the default.',
    "LRFinder": _FIND_LR,
    "LearningRateFinder": _FIND_LR,
    "PyTorchProfiler": "Write hapi.callbacks.Profiler.",
    "WeightAveraging": "Write hapi.callbacks.EMA.",
    "BatchSizeFinder": "Write hapi.find_batch_size(model, data).",
}
_TORCHMETRICS = "Write torchmetrics.{name}(...): prepare(metrics=...) takes torchmetrics' objects as they are."
_OF_METRICS = {
    "F1Score": "Write hapi.metrics.F1.",
    "AUROC": "Write hapi.metrics.Auc.",
    "TopKCategoricalAccuracy": "Write hapi.metrics.Accuracy(topk=(1, 5)).",
    "MAE": "Write hapi.metrics.MeanAbsoluteError.",
    "MSE": "Write hapi.metrics.MeanSquaredError.",
    **dict.fromkeys(
        ("CategoricalAccuracy", "SparseCategoricalAccuracy", "MulticlassAccuracy", "BinaryAccuracy"),
        "Write hapi.metrics.Accuracy.",
    ),
    **dict.fromkeys(("ConfusionMatrix", "R2Score", "AveragePrecision"), _TORCHMETRICS),
}
_COLLECTIVES = (
    "Write torch.distributed.{name}(...) after hapi.distributed.init_parallel_env(); fit, evaluate and predict "
    "exchange by themselves."
)
_OF_DISTRIBUTED = {
    **dict.fromkeys(("all_reduce", "all_gather", "broadcast", "reduce", "scatter", "send", "recv"), _COLLECTIVES),
    **dict.fromkeys(("all_gather_object", "broadcast_object_list", "new_group", "ReduceOp"), _COLLECTIVES),
    "launch": _OF_HAPI["launch"],
    "init_process_group": "Write hapi.distributed.init_parallel_env(); a Model calls it itself.",
    "DistributedDataParallel": _OF_HAPI["DataParallel"],
    "DistributedSampler": "Write hapi.distributed.DistributedBatchSampler; fit shares its data out by itself.",
}
_OF_PACKAGE = {
    "hapi": _OF_HAPI,
    "hapi.callbacks": _OF_CALLBACKS,
    "hapi.metrics": _OF_METRICS,
    "hapi.distributed": _OF_DISTRIBUTED,
}

_ON_NETWORK = "A Model is no module: it has one. Write model.network.{name}{call}."
_MODES = (
    "fit, evaluate and predict set the modes themselves, and put them back. Outside of them write model.network.{name}"
    "{call}."
)
_DEVICE = "The first call of fit, evaluate or predict moves it. To choose another device write hapi.set_device({to})."
_WEIGHTS = (
    'Write model.save("mnist") and model.load("mnist"), which keep the optimizer too; of the weights alone '
    "model.network.state_dict() and model.network.load_state_dict(state)."
)
_DATA = "Data is given to each call: model.fit(train_data, eval_data), model.evaluate(data), model.predict(data)."
_LOG = (
    "What is to be logged is a metric: prepare(optimizer, loss, metrics=[f]), where f(outputs, labels) gives a value "
    "for each sample. What is no value of a batch, a callback of yours may print or keep in its on_epoch_end."
)
_FIT = "Write model.fit(data), whatever the kind of data: arrays, a data set, a DataLoader, a list of batches."
# Of a Model, in groups of one answer.
_OF_MODEL = {
    _MODES: "eval train",
    _DEVICE: "to cuda cpu device",
    _WEIGHTS: "state_dict load_state_dict save_weights load_weights get_weights set_weights save_checkpoint "
    "load_checkpoint load_from_checkpoint save_pretrained from_pretrained save_model load_model",
    _DATA: "train_dataloader val_dataloader test_dataloader predict_dataloader train_dataloaders val_dataloaders "
    "train_data eval_data datamodule",
    _LOG: "log log_dict log_metrics add_metric",
    _FIT: "fit_generator fit_dataset fit_loader fit_one_cycle train_loop",
    "Write model.prepare(optimizer, loss, metrics); with compile=True the network is compiled by torch.compile.": (
        "compile configure_optimizers"
    ),
    "Write model.evaluate(data).": "test validate evaluate_generator evaluate_dataset score test_loop",
    "Write model.predict(data); of scores it gives what the network gives: model.predict(data).softmax(1).": (
        "predict_proba predict_classes predict_generator predict_dataset predict_loader"
    ),
    "Write model.train_batch(inputs, labels).": "train_on_batch fit_batch",
    "Write model.eval_batch(inputs, labels).": "test_on_batch evaluate_on_batch",
    "Write model.predict_batch(inputs).": "predict_on_batch test_batch",
    "Write def train_step(self, inputs, labels) in a subclass, and `return loss, outputs`.": "training_step",
    "fit returns it: history = model.fit(data), then history.history.": "history",
    "Write model.epochs_trained.": "current_epoch epoch",
    "Write model.steps_trained.": "global_step",
    "Write model.optimizer.param_groups[0]['lr'].": "lr learning_rate",
    "hapi does both at the edges of optimizer steps, in fit and in model.train_batch(inputs, labels).": (
        "zero_grad backward manual_backward optimizers"
    ),
    "Write model.export(path).": "to_onnx to_torchscript onnx",
    "Write model.stop_training = True.": "should_stop",
}
_MODEL_NAMES = {name: cure for cure, names in _OF_MODEL.items() for name in names.split()}

# Of a method: what stands there -> the argument here, of this method or of another one.
_RENAMED = {
    "train_data": "train_dataset train_loader train_dataloader train_dataloaders training_data train_dl dataset data "
    "dataloader loader x",
    "eval_data": "validation_data val_data valid_data val_dataset valid_dataset validation_dataset val_loader "
    "valid_loader validation_loader val_dataloader val_dataloaders valid_dataloader eval_dataset eval_loader "
    "eval_dataloader test_loader test_dataset test_data val_dl valid_dl dataset data dataloader loader x",
    "test_data": "data dataset dataloader dataloaders loader x inputs test_loader test_dataset predict_data",
    "epochs": "max_epochs num_epochs n_epochs nb_epoch nb_epochs epoch n_epoch num_train_epochs num_epoch",
    "callbacks": "callback cbs",
    "batch_size": "batchsize bs batch batch_sizes minibatch_size train_batch_size per_device_train_batch_size "
    "eval_batch_size",
    "num_iters": "max_steps steps num_steps max_iters n_iters iters max_iter num_iter iterations",
    "eval_freq": "validation_freq check_val_every_n_epoch val_freq eval_every eval_interval val_interval "
    "evaluation_freq",
    "log_freq": "log_every_n_steps log_interval print_freq logging_steps log_steps log_every",
    "save_freq": "save_interval save_every save_period save_steps",
    "save_dir": "default_root_dir output_dir save_path checkpoint_dir ckpt_dir root_dir dirpath weights_save_path",
    "num_workers": "workers num_worker n_workers dataloader_num_workers n_jobs",
    "resume": "ckpt_path resume_from_checkpoint resume_from checkpoint ckpt",
    "accumulate_grad_batches": "accumulate accumulation_steps gradient_accumulation_steps accum_steps accum_iter "
    "grad_accum accumulate_grad",
    "verbose": "verbosity progress_bar enable_progress_bar",
    "seed": "random_state random_seed",
    "optimizer": "optim optimizers opt",
    "loss": "criterion loss_fn loss_func loss_function losses objective criterions",
    "metrics": "metric metric_fns",
    "amp_configs": "amp precision mixed_precision fp16 bf16 use_amp amp_level amp_dtype",
    "scheduler": "lr_scheduler lr_schedule schedulers sched lr_scheduler_type",
    "clip_grad_norm": "gradient_clip_val max_grad_norm grad_clip clip_grad clip_norm max_norm clipnorm grad_norm clip",
    "compile": "jit_compile torch_compile",
    "sync_batchnorm": "sync_bn sync_batch_norm",
    "ddp_options": "find_unused_parameters static_graph gradient_as_bucket_view bucket_cap_mb",
    "stack_outputs": "stack concat stacked",
    "network": "model net module",
}
_IN_OPTIMIZER = (
    "It is the optimizer's: write model.prepare(torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.0), loss)."
)
_IN_LOADER = (
    "It is a loader's: give torch.utils.data.DataLoader(data, batch_size=32, shuffle=True, {name}=...) as data."
)
# num_iters would end the training in its first epoch.
_IN_EPOCH = (
    "An epoch is all of the data: pass fewer samples, torch.utils.data.Subset(data, range(1000)), or a shorter list of "
    "batches. (num_iters= counts the training steps of all epochs together.)"
)
_IN_EVALUATION = "All of eval_data is evaluated: pass fewer samples, torch.utils.data.Subset(data, range(1000))."
_SAID_OTHERWISE = {
    "steps_per_epoch": _IN_EPOCH,
    "limit_train_batches": _IN_EPOCH,
    "validation_steps": _IN_EVALUATION,
    "limit_val_batches": _IN_EVALUATION,
    "y": "Data and labels go together, as one tuple: (x, y).",
    "target": "Data and labels go together, as one tuple: (x, y).",
    "targets": "Data and labels go together, as one tuple: (x, y).",
    "lr": _IN_OPTIMIZER,
    "learning_rate": _IN_OPTIMIZER,
    "weight_decay": _IN_OPTIMIZER,
    "momentum": _IN_OPTIMIZER,
    "collate_fn": _IN_LOADER,
    "sampler": _IN_LOADER,
    "batch_sampler": _IN_LOADER,
    "pin_memory": _IN_LOADER,
    "persistent_workers": _IN_LOADER,
    "validation_split": "Write train, val = torch.utils.data.random_split(data, [0.9, 0.1]) after hapi.seed(0), and "
    "fit(train, eval_data=val).",
    "class_weight": "Classes are weighed by the loss: write prepare(optimizer, nn.CrossEntropyLoss(weight=...)).",
    "sample_weight": "Samples are weighed by the loss: let it return (sum, count), and the data yield the weights as a "
    "further label.",
    "initial_epoch": "Epochs go on by themselves where an earlier fit ended; for another process write "
    'fit(..., save_dir="checkpoints", resume=True).',
    "patience": "Write callbacks=[hapi.callbacks.EarlyStopping(patience=3)].",
    "early_stopping": "Write callbacks=[hapi.callbacks.EarlyStopping(patience=3)].",
    "logger": 'Write callbacks=[hapi.callbacks.TensorBoard("logs")], or CSVLogger.',
    "loggers": 'Write callbacks=[hapi.callbacks.TensorBoard("logs")], or CSVLogger.',
    "device": 'Write hapi.set_device("gpu:0") before it; without it the first accelerator is taken.',
    "accelerator": 'Write hapi.set_device("gpu:0") before it; without it the first accelerator is taken.',
    "strict": "Write skip_mismatch=True in place of strict=False.",
    "map_location": "Weights go to where the network's are, whatever device they were saved on: leave it out.",
    "weights_only": "Files are never allowed to run code: leave it out.",
    "devices": "Several devices are the launcher's: write hapirun --gpus 0,1 train.py, or torchrun.",
    "gpus": "Several devices are the launcher's: write hapirun --gpus 0,1 train.py, or torchrun.",
    "num_nodes": "Several hosts are the launcher's: write hapirun --ips A,B train.py, or torchrun.",
}
# Of constructors of callbacks and data sets: Keras', Lightning's, torchvision's.
_CONSTRUCTED = {
    "EarlyStopping": {
        "restore_best_weights": 'The best model is kept in save_dir: write fit(..., save_dir="checkpoints"), and after '
        'it model.load("checkpoints/best_model").',
    },
    "ModelCheckpoint": {
        "save_best_only": 'Write monitor="val_loss": the best is kept as best_model, beside the epochs.',
        "save_weights_only": "Weights are in a file of their own, NAME.pt: leave it out.",
        "filepath": "Write save_dir= in place of filepath=; it names a folder.",
        "dirpath": "Write save_dir= in place of dirpath=.",
        "period": "Write save_freq= in place of period=.",
        "every_n_epochs": "Write save_freq= in place of every_n_epochs=.",
        "every_n_train_steps": "Write every_n_steps= in place of every_n_train_steps=.",
    },
}
_OF_DATA_SET = {"train": 'Write mode="train" or mode="test".', "split": 'Write mode="train" or mode="test".'}
_METHODS = ("__init__", "prepare", "fit", "evaluate", "predict", "save", "load")


def package_attribute(name: str, known: Iterable[str], package: str) -> AttributeError:
    """The error for `{package}.{name}`, which is not there.

    Args:
        name: The name.
        known: Those that are there.
        package: `hapi`, or a package of it.
    """
    cure = _OF_PACKAGE[package].get(name, "").format(name=name) or _did_you_mean(name, known, package + ".{}")
    return _no_attribute(f"module {package!r} has no attribute {name!r}", name, cure)


def model_attribute(model: Any, name: str) -> AttributeError:
    """The error for an attribute that a Model does not have."""
    kind, call = type(model).__name__, "()"
    cure = _MODEL_NAMES.get(name)
    network = vars(model).get("network")
    if cure is None and not name.startswith("__") and hasattr(network, name):
        cure, call = _ON_NETWORK, "()" if inspect.ismethod(getattr(network, name)) else ""
    if cure is None:
        cure = _did_you_mean(name, dir(model), "model.{}") if not name.startswith("_") else ""
    text = f"{kind!r} object has no attribute {name!r}"
    to = '"cpu"' if name == "cpu" else '"gpu:0"'
    return _no_attribute(text, name, cure.replace("{to}", to).format(name=name, call=call))


def _no_attribute(text: str, name: str, cure: str) -> AttributeError:
    # Of no object, so that a traceback suggests nothing else.
    return AttributeError(f"{text}: {cure}", name=name, obj=None) if cure else AttributeError(text)


def keywords(model: Any, method: str, unknown: Mapping[str, Any]) -> TypeError:
    """The error for keywords that a method of a Model does not have.

    Args:
        model: The Model.
        method: The name of the method.
        unknown: The keywords and what they were given.
    """
    # Not a subclass's own, which may take anything.
    cls = next(kind for kind in type(model).__mro__ if kind.__module__ == "hapi.model")
    arguments = {name: _arguments_of(getattr(cls, name)) for name in _METHODS}
    shown = ", ".join(f"{name}={value!r:.40}" for name, value in unknown.items())
    called = "Model" if method == "__init__" else method
    cures = list(dict.fromkeys(_cure(name, method, arguments) for name in unknown))
    what = "which is no argument of it" if len(unknown) == 1 else "which are no arguments of it"
    return TypeError(f"{called} received {shown}, {what}. {' '.join(cures)}")


def constructor(owner: type, unknown: Mapping[str, Any]) -> TypeError:
    """The error for keywords that the constructor of a callback or a data set does not have.

    Args:
        owner: The class that is to be constructed.
        unknown: The keywords and what they were given.
    """
    # A subclass's own arguments are not meant.
    ours = next(kind for kind in owner.__mro__ if kind.__module__.startswith("hapi."))
    known, said = _arguments_of(ours.__init__), _CONSTRUCTED.get(ours.__name__, _OF_DATA_SET)  # type: ignore[misc]
    cures = [said.get(name) or _did_you_mean(name, known, "{}=") for name in unknown]
    shown = ", ".join(f"{name}={value!r:.40}" for name, value in unknown.items())
    what = "which is no argument of it" if len(unknown) == 1 else "which are no arguments of it"
    cure = " ".join(dict.fromkeys(filter(None, cures))) or f"It takes {', '.join(known)}."
    return TypeError(f"{owner.__name__} received {shown}, {what}. {cure}")


def _cure(name: str, method: str, arguments: Mapping[str, list[str]]) -> str:
    others = [other for other in _METHODS if other != method]
    meant = [ours for ours, names in _RENAMED.items() if name in names.split()]
    for ours in meant:
        if ours in arguments[method]:
            return f"Write {ours}= in place of {name}=."
    if name in _SAID_OTHERWISE:
        return _SAID_OTHERWISE[name].format(name=name)
    for ours in [name, *meant]:
        for other in others:
            if ours in arguments[other]:
                written = "hapi.Model" if other == "__init__" else f"model.{other}"
                return f"{ours} is an argument of {written}: write {written}(..., {ours}=...)."
    near = _did_you_mean(name, arguments[method], "{}=")
    return near or f"It takes {', '.join(arguments[method])}."


def _arguments_of(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]


def _did_you_mean(name: str, known: Iterable[str], form: str) -> str:
    public = [other for other in known if not other.startswith("_")]
    near = difflib.get_close_matches(name, public, n=1, cutoff=0.7)
    return f"Write {form.format(near[0])}, if that is meant." if near else ""
