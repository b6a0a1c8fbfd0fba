"""The parts of a trial's configuration: data, hyperparameters, engine and weights, each checked by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from classify.config.hyperparameters import Hyperparameters
from classify.engine import deepspeed_config
from classify.images.settings import DataSettings
from classify.images.splits import Splits
from classify.images.streaming import Streaming
from classify.models import pretrained, registry
from deepspeed_trial.errors import ErrorList
from deepspeed_trial.patches.process import prepare_process


class Parts:
    """The parts of a configuration, each checked by itself.

    Attributes:
        errors: what is wrong with any of them; without errors, all of them are there.
    """

    data: DataSettings | None = None
    source: Splits | None = None
    hyper: Hyperparameters | None = None
    merged: deepspeed_config.Merged | None = None
    weights: dict[str, Tensor] | None = None  # where the hyperparameters name some

    def __init__(
        self, hparams: Mapping[str, Any], experiment: Mapping[str, Any], source: Splits | None
    ) -> None:
        self.errors = ErrorList()
        size = None
        with self.errors.collecting():
            size = registry.input_size(hparams.get("net"), hparams.get("weights"))
        with self.errors.collecting():
            self.data = DataSettings.parse(experiment.get("data"), size)
            self.source = source or self.data.open_source()
            for split in self.source.names:
                self.source.count(split)  # which looks for the files
            Streaming.resolve(self.data, self.source)
        with self.errors.collecting():
            self.hyper = Hyperparameters.parse(hparams, registry.check_name)
        if form := self.hyper or Hyperparameters.parse_form(hparams):
            with self.errors.collecting():
                self.merged = deepspeed_config.merge(form)
        if self.hyper and self.hyper.weights:
            with self.errors.collecting():
                size = self.data.image_size if self.data else size or DataSettings().image_size
                classes = self.source.classes if self.source else ()
                net, args = self.hyper.net, self.hyper.net_args
                self.weights = pretrained.read(net, self.hyper.weights, size, args, classes)


def errors_of(hparams: Mapping[str, Any], experiment: Mapping[str, Any]) -> list[str]:
    """What is wrong by itself with the parts of a configuration, of which other fields are wrong already."""
    prepare_process()
    return list(dict.fromkeys(Parts(hparams, experiment, None).errors.lines))
