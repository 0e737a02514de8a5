"""`Model`: the face of the library. It checks what it is given, and hands over to the loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from hapi import arguments, checkpoint, session, single
from hapi.batch import Inputs, Splitter, call_network
from hapi.callbacks import History
from hapi.distributed import group
from hapi.distributed.parallel import checked_options
from hapi.engine import Engine
from hapi.metrics.adapters import as_metrics
from hapi.objective import Objective, holds_loss
from hapi.optimizers import make_optimizer
from hapi.precision import Precision
from hapi.scheduling import make_schedule, set_interval
from hapi.step import Prepared


class Model:
    """A network with all that training, evaluating and predicting need.

    Constructing one starts nothing: no process group, no device context. Subclasses may override `train_step` and
    `eval_step`; wrapping, precision, accumulation, clipping, logging and saving go on working.

    Args:
        network: Any module. It stays the user's own object, unwrapped, as `model.network`.
        inputs: Which part of a batch the network gets: how many leading elements of a tuple batch, or names of keys of
            a dict batch. By default a tuple of two or more gives all but its last, one tensor gives itself, a dict
            gives the keys that `network.forward` names.
        labels: Which part the loss gets: how many trailing elements, or names of keys. By default the rest.

    Attributes:
        network: The network.
        optimizer, loss: As they were prepared, or None.
        stop_training: Set it to True, on any rank, to end `fit` on all of them.
        epochs_trained: Epochs over all calls of `fit`.
        steps_trained: Steps (batches a rank) over all calls of `fit`.
    """

    network = arguments.SetBy("Make another one: hapi.Model(network).")
    optimizer = arguments.SetBy("Write model.prepare(optimizer, loss).")
    loss = arguments.SetBy("Write model.prepare(optimizer, loss).")

    def __init__(
        self,
        network: nn.Module,
        inputs: int | Sequence[str] | None = None,
        labels: int | Sequence[str] | None = None,
        **unknown: NoReturn,
    ) -> None:
        arguments.refuse_unknown(self, "__init__", unknown)
        arguments.check_model(network, self.train_step, self.eval_step)
        vars(self)["network"] = network
        self.stop_training = False
        self.epochs_trained = 0
        self.steps_trained = 0
        self._engine = Engine(network, Splitter(network, inputs, labels), self.train_step, self.eval_step)
        self.prepare()

    def prepare(
        self,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Any = None,
        amp_configs: str | dict[str, Any] | None = None,
        *,
        scheduler: Any = None,
        scheduler_interval: str | None = None,
        clip_grad_norm: float | None = None,
        compile: bool = False,
        strategy: str = "auto",
        sync_batchnorm: bool = False,
        ddp_options: dict[str, Any] | None = None,
        channels_last: bool = False,
        **unknown: NoReturn,
    ) -> Model:
        """Set what training and evaluation use. May be called again.

        Args:
            optimizer: An optimizer, a callable that makes one from the parameters, or "sgd", "adam", "adamw".
            loss: Called as `loss(outputs, labels)`, several of either spread; returns the mean over the samples, or
                `(sum, count)`. Without one, the output's own `loss` is taken.
            metrics: One or a list of `hapi.metrics.Metric`, torchmetrics objects, or functions
                `f(outputs, labels) -> per-sample tensor`.
            amp_configs: "bf16", "fp16", "O1", "O2", or a dict of options; see `hapi.precision.Precision`.
            scheduler: A learning rate scheduler, or a callable that makes one from the optimizer.
            scheduler_interval: "step" (optimizer step) or "epoch"; by default what the class is meant for.
            clip_grad_norm: The largest norm of the gradient of an optimizer step.
            compile: Compile the network with torch.compile, at the first full batch of each shape: it takes seconds or
                minutes. Short last batches, and shapes after torch's `recompile_limit`, run uncompiled.
            strategy: "auto" or "ddp": several processes train in data parallel either way.
            sync_batchnorm: Let BatchNorm see the global batch. Needs an accelerator.
            ddp_options: Further options of DistributedDataParallel.
            channels_last: Keep images and convolutions in torch's channels-last layout, which is often faster.

        Returns:
            The model itself.

        Raises:
            ValueError: A name is unknown, or the optimizer is of another network.
            TypeError: An argument cannot serve.
        """
        arguments.refuse_unknown(self, "prepare", unknown)
        arguments.check_prepare(loss, strategy, clip_grad_norm)
        objective = Objective(loss)
        made = make_optimizer(optimizer, self.network, objective.module)
        prepared = Prepared(
            optimizer=made,
            objective=objective,
            metrics=as_metrics(metrics),
            precision=Precision(amp_configs),
            schedule=make_schedule(scheduler, scheduler_interval, made),
            clip_grad_norm=clip_grad_norm,
            switches=arguments.Switches(compile, sync_batchnorm, channels_last),
            ddp_options=checked_options(ddp_options),
        )
        # Not before all of it is checked.
        vars(self).update(optimizer=made, loss=loss)
        self._engine.prepare(prepared)
        return self

    def fit(
        self,
        train_data: Any,
        eval_data: Any = None,
        batch_size: int | Sequence[int] | None = None,
        epochs: int = 1,
        eval_freq: int = 1,
        log_freq: int = 10,
        save_dir: str | Path | None = None,
        save_freq: int = 1,
        verbose: int = 1,
        drop_last: bool | None = None,
        shuffle: bool | None = None,
        num_workers: int | None = None,
        callbacks: Any = None,
        accumulate_grad_batches: int = 1,
        num_iters: int | None = None,
        *,
        global_batch_size: int | None = None,
        resume: bool | str | Path | None = None,
        seed: int | None = None,
        nan_policy: str = "stop",
        **unknown: NoReturn,
    ) -> History:
        """Train.

        Args:
            train_data: A data set, a DataLoader, tensors or arrays such as `(x, y)`, or a list of batches.
            eval_data: The same, evaluated every `eval_freq` epochs and after the last; not anew where a callback ends
                the run once an epoch is over.
            batch_size: Samples per process and step (32), or `[train, eval]`. Not with a DataLoader.
            epochs: So many more epochs; numbering and shuffle order go on where an earlier call ended.
            eval_freq: In epochs.
            log_freq: In steps.
            save_dir: Where checkpoints go: `{epoch}` every `save_freq` epochs, and `final`.
            save_freq: In epochs.
            verbose: 0 silent, 1 a bar per epoch, 2 a line every `log_freq` steps.
            drop_last: Leave out a last, short global batch (False).
            shuffle: Draw a new order each epoch (True).
            num_workers: Processes that load data (0).
            callbacks: One or a list of `hapi.callbacks.Callback`.
            accumulate_grad_batches: Batches per optimizer step; equal to one batch that many times as large.
            num_iters: At most so many training steps in this call.
            global_batch_size: Samples per step over all processes, instead of `batch_size`.
            resume: True goes on from the newest whole checkpoint in `save_dir` (a fresh start if there is none), a
                path from that one (of a folder: the newest in it), False never. None: only when a launcher has
                restarted this process. `epochs` then counts the whole run.
            seed: Of the shuffle order and of all that is drawn; by default drawn from torch's generator.
            nan_policy: "stop" raises on an infinite or NaN loss, "ignore" goes on.

        Returns:
            The values of each epoch.

        Raises:
            ValueError: An argument cannot work; each message says what to write instead.
            TypeError: An argument is of a type that cannot serve.
            RuntimeError: The loss became infinite or NaN.
        """
        arguments.refuse_unknown(self, "fit", unknown)
        options = arguments.FitOptions(
            batch_size, global_batch_size, epochs, eval_freq, log_freq, save_dir, save_freq, verbose, drop_last,
            shuffle, num_workers, accumulate_grad_batches, num_iters, resume, seed, nan_policy,
        )  # fmt: skip
        return session.fit(self, train_data, eval_data, callbacks, options)

    def evaluate(
        self,
        eval_data: Any,
        batch_size: int = 32,
        log_freq: int = 10,
        verbose: int = 1,
        num_workers: int = 0,
        callbacks: Any = None,
        num_iters: int | None = None,
        **unknown: NoReturn,
    ) -> dict[str, float]:
        """Compute loss and metrics over a data set, each sample once, whatever the number of processes.

        Args:
            eval_data: As `train_data` of `fit`.
            batch_size: Samples per process and step. Not with a DataLoader or a list of batches.
            log_freq: In steps.
            verbose: 0 silent, 1 a bar, 2 a line every `log_freq` steps.
            num_workers: Processes that load data.
            callbacks: One or a list of callbacks.
            num_iters: At most so many steps.

        Returns:
            `loss` (the mean over samples; NaN where all labels are ignored) and the metrics, the same on every rank.
        """
        arguments.refuse_unknown(self, "evaluate", unknown)
        options = session.PassOptions("eval_data", batch_size, log_freq, verbose, num_workers, num_iters)
        return session.evaluate(self, eval_data, callbacks, options)

    def predict(
        self,
        test_data: Any,
        batch_size: int = 32,
        num_workers: int = 0,
        stack_outputs: bool = True,
        verbose: int = 1,
        callbacks: Any = None,
        **unknown: NoReturn,
    ) -> Any:
        """Compute the network's outputs for a data set.

        Args:
            test_data: As `train_data` of `fit`; labels in it are left aside.
            batch_size: Samples per process and step. Not with a DataLoader or a list of batches.
            num_workers: Processes that load data.
            stack_outputs: Stack the rows of all batches; otherwise a list with one entry per batch.
            verbose: 0 silent, 1 a bar, 2 lines.
            callbacks: One or a list of callbacks.

        Returns:
            The network's own output structure (tensor, tuple, dict), with tensors of n rows on the CPU in the data
            set's order, on every rank.

        Raises:
            ValueError: Rows differ in shape and cannot be stacked.
        """
        arguments.refuse_unknown(self, "predict", unknown)
        options = session.PassOptions("test_data", batch_size, 10, verbose, num_workers)
        return session.predict(self, test_data, callbacks, options, stack_outputs)

    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> dict[str, float]:
        """Train on one batch; every rank calls it with its own part of the global batch.

        Args:
            inputs: A tensor or array, a tuple or list of several, or a dict.
            labels: None, one, or several.
            update: Take an optimizer step. False only adds to the gradients of the next call that does.

        Returns:
            This rank's `loss` and metrics of the batch; NaN where this rank, one of several, passed no samples.
        """
        return single.train_batch(self._engine, inputs, labels, update)

    def eval_batch(self, inputs: Any, labels: Any = None) -> dict[str, float]:
        """This rank's `loss` and metrics of one batch, without training. Arguments as of `train_batch`."""
        return single.eval_batch(self._engine, inputs, labels)

    def predict_batch(self, inputs: Any) -> Any:
        """The network's outputs for one batch, on the CPU. Inputs as in `train_batch`."""
        return single.predict_batch(self._engine, inputs)

    @group.naming_the_lost()
    def save(self, path: str | Path, training: bool = True) -> None:
        """Save to `path.pt` (the network's plain state dict) and `path.opt.pt` (what training needs to go on).

        May be called on all ranks or on rank 0 alone; global rank 0 writes.

        Args:
            path: Without ending; folders are made. A path that ends in `.safetensors` (the extra `safetensors`) gets
                the weights alone, in a format that has no checksum.
            training: False: write an inference program to `path.pt2` instead, as `export` does.

        Raises:
            TypeError: Something in it would be refused when loaded; the message names its key.
            OSError: The files cannot be written.
        """
        arguments.check_switches(training=training)
        if not training and not checkpoint.is_tensorfile(path):
            text = str(path)
            self.export(text if text.endswith((".pt2", ".onnx")) else f"{text.removesuffix('.pt')}.pt2")
        elif group.speaks_for_all():
            arguments.tell_of_ending(path)
            checkpoint.write(path, self._snapshot())

    def _snapshot(self) -> checkpoint.Snapshot:
        counters = {"epochs_trained": self.epochs_trained, "steps_trained": self.steps_trained}
        return checkpoint.take(self.network, self._engine.training_state(counters))

    def load(
        self, path: str | Path, skip_mismatch: bool = False, reset_optimizer: bool = False, **unknown: NoReturn
    ) -> None:
        """Load what `save` wrote, or the weights alone from a state dict of plain torch. Called on every rank.

        Args:
            path: As it was given to `save`; or a file of weights, also `x.safetensors`.
            skip_mismatch: Skip missing, unexpected and wrongly shaped weights, with a warning that names them. The
                training state is then left out as well.
            reset_optimizer: Load the weights alone.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is damaged, of another network, or the two files are of different saves.
        """
        arguments.refuse_unknown(self, "load", unknown)
        from hapi import resuming

        resuming.load(self, path, skip_mismatch, reset_optimizer)

    def export(self, path: str | Path, example_inputs: Any = None) -> None:
        """Write an inference program: `x.pt2` (torch.export) or `x.onnx` (the extra `onnx`), for any batch size.

        Args:
            path: Its ending decides the format.
            example_inputs: Inputs to trace with, as in `train_batch`; by default those of the last batch seen.
        """
        from hapi import export

        if group.speaks_for_all():
            engine = self._engine
            inputs = engine.example() if example_inputs is None else engine.splitter.as_inputs(example_inputs)
            export.export(self.network, path, inputs)

    def parameters(self) -> list[nn.Parameter]:
        """The network's parameters."""
        return list(self.network.parameters())

    def summary(self, input_size: Any = None, dtype: Any = None) -> dict[str, int]:
        """Print a table of layers, output shapes and parameters; see `hapi.layer_table.summary`.

        Args:
            input_size: The shape of the inputs with the batch dimension, or a list of shapes; by default that of the
                last batch seen.
            dtype: Of the inputs, one or a list.

        Returns:
            `total_params` and `trainable_params`.
        """
        from hapi.layer_table import summary

        known = self._engine.example() if input_size is None else None
        return summary(self.network, input_size, dtype, inputs=known)

    def train_step(self, inputs: Inputs, labels: Any) -> tuple[Any, Any]:
        """Compute the loss of one batch. Override it for a computation of your own.

        Args:
            inputs: A tuple, or a dict for dict batches, on the device.
            labels: None, one, or a tuple of several.

        Returns:
            The loss (a mean over the samples, or `(sum, count)`) and the outputs that metrics get. What
            `super().train_step` gives as loss may be added to and scaled; it is a tensor, or a `Loss` that knows its
            weight, whose `mean` is one.
        """
        outputs = call_network(self.network, inputs)
        return self._engine.loss_of(outputs, labels), outputs

    def eval_step(self, inputs: Inputs, labels: Any) -> tuple[Any, Any]:
        """The same for evaluation, under torch.no_grad(). The loss may be None where there is none."""
        outputs = call_network(self.network, inputs)
        if self._engine.prepared.objective.missing and not holds_loss(outputs):
            return None, outputs
        return self._engine.loss_of(outputs, labels), outputs

    if not TYPE_CHECKING:
        # Nothing is there by these: they word errors, which type checkers are to find by themselves.
        __call__ = arguments.refuse_call
        __getattr__ = arguments.missing_attribute

    def __repr__(self) -> str:
        parts = [type(self.network).__name__, *([type(self.optimizer).__name__] if self.optimizer is not None else [])]
        return f"Model({', '.join(parts)}; {self.epochs_trained} epochs trained)"

    @property
    def scheduler(self) -> Any:
        """The prepared learning rate scheduler, or None."""
        schedule = self._engine.prepared.schedule
        return schedule.scheduler if schedule is not None else None

    @property
    def scheduler_interval(self) -> str | None:
        """When the scheduler moves: "step" or "epoch"; None without one. May be set."""
        schedule = self._engine.prepared.schedule
        return schedule.interval if schedule is not None else None

    @scheduler_interval.setter
    def scheduler_interval(self, interval: str) -> None:
        set_interval(self._engine.prepared.schedule, interval)
