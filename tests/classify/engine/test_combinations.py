"""What among the hyperparameters does not go together."""

from ruamel.yaml import YAML

from classify.config.hyperparameters import Hyperparameters
from classify.engine.combinations import combination_errors, network_errors
from classify.engine.trial_config import TrialConfig
from classify.models import registry
from harness import machine


def test_errors_of_hyperparameters():
    for chosen, part in {
        "net: resnet18, moe: true": "resnet18 has no experts",
        "net: resnet18, pipe_parallel_size: 2": "no sequence of layers",
        "net: alexnet, pipe_parallel_size: 2, checkpoint_activations: true": "does not go with a pipeline",
        "net: net-moe, net_args: {a: 1}": "experts have hyperparameters of their own",
        "net: net-moe, checkpoint_activations: true": "does not go with experts",
    }.items():
        hyper = Hyperparameters.parse(YAML(typ="safe").load(f"{{{chosen}}}"), registry.check_name)
        (line,) = network_errors(hyper, 2)
        assert part in line


def test_no_average_of_weights_on_a_disk():
    hyper = Hyperparameters.parse({"weight_average": {}}, registry.check_name)
    for what in ("offload_optimizer", "offload_param"):
        config = {"zero_optimization": {"stage": 3, what: {"device": "nvme", "nvme_path": "/tmp"}}}
        (line,) = [each for each in combination_errors(config, hyper, "cpu") if "weight_average" in each]
        assert line.startswith(f"zero_optimization.{what}.device: 'nvme': ")


def test_a_processor_without_bf16_is_named_where_autocast_asks_for_it(monkeypatch):
    hyper = {
        "train_batch_size": 32,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "max_length": {"batches": 1},
    }
    config = TrialConfig.resolve(hyper, {"data": {"dataset": "digits"}}, 1, "cpu")
    for flags, notes in {"fpu avx2": 1, "fpu avx512f avx512_bf16": 0, "": 0}.items():
        monkeypatch.setattr(machine, "_cpuinfo", lambda key, flags=flags: flags)
        assert len(config.notes) == notes
        assert all("torch_autocast.enabled: True: this processor" in note for note in config.notes)
