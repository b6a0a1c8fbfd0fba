"""What among the hyperparameters does not go together."""

from ruamel.yaml import YAML

from classify.config.hyperparameters import Hyperparameters
from classify.engine.combinations import network_errors
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
