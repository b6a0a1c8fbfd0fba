"""What among the hyperparameters does not go together."""

from ruamel.yaml import YAML

from classify.config.hyperparameters import Hyperparameters
from classify.engine.combinations import combination_errors, network_errors
from classify.models import registry


def test_errors_of_hyperparameters():
    for chosen, part in {
        "net: resnet18, moe: true": "resnet18 has no experts",
        "net: resnet18, pipe_parallel_size: 2": "no sequence of layers",
        "net: alexnet, pipe_parallel_size: 2, checkpoint_activations: true": "does not go with a pipeline",
        "net: net-moe, net_args: {a: 1}": "experts have hyperparameters of their own",
        "net: net-moe, checkpoint_activations: true": "does not go with experts",
    }.items():
        hyper = Hyperparameters.parse(YAML(typ="safe").load(f"{{{chosen}}}"), registry.names())
        (line,) = network_errors(hyper, 2)
        assert part in line


def test_no_average_of_weights_on_a_disk():
    hyper = Hyperparameters.parse({"weight_average": {}}, registry.names())
    for what in ("offload_optimizer", "offload_param"):
        config = {"zero_optimization": {"stage": 3, what: {"device": "nvme", "nvme_path": "/tmp"}}}
        (line,) = [each for each in combination_errors(config, hyper, "cpu") if "weight_average" in each]
        assert line.startswith(f"zero_optimization.{what}.device: 'nvme': ")
