import torch

from net import Net

# The network of the PyTorch tutorial. Columns: layer, type, input shape, output shape, parameters.
TABLE = [
    ("conv1", "Conv2d", (2, 3, 32, 32), (2, 6, 28, 28), 456),
    ("pool", "MaxPool2d", (2, 6, 28, 28), (2, 6, 14, 14), 0),
    ("conv2", "Conv2d", (2, 6, 14, 14), (2, 16, 10, 10), 2416),
    ("pool", "MaxPool2d", (2, 16, 10, 10), (2, 16, 5, 5), 0),
    ("fc1", "Linear", (2, 400), (2, 120), 48120),
    ("fc2", "Linear", (2, 120), (2, 84), 10164),
    ("fc3", "Linear", (2, 84), (2, 10), 850),
]


def test_layers():
    net, called = Net(), []
    for name, module in net.named_children():

        def note(layer, given, got, name=name):
            parameters = sum(each.numel() for each in layer.parameters())
            called.append((name, type(layer).__name__, tuple(given[0].shape), tuple(got.shape), parameters))

        module.register_forward_hook(note)
    net(torch.zeros(2, 3, 32, 32))
    assert called == TABLE
    assert sum(each.numel() for each in net.parameters()) == 62_006
    assert [name for name, _ in net.named_children()] == ["conv1", "pool", "conv2", "fc1", "fc2", "fc3"]


def test_the_forward_pass_is_the_tutorials():
    torch.manual_seed(0)
    net, x = Net(7), torch.randn(3, 3, 32, 32)
    f = torch.nn.functional
    y = f.max_pool2d(f.relu(f.conv2d(x, net.conv1.weight, net.conv1.bias)), 2)
    y = f.max_pool2d(f.relu(f.conv2d(y, net.conv2.weight, net.conv2.bias)), 2).flatten(1)
    y = f.relu(f.linear(f.relu(f.linear(y, net.fc1.weight, net.fc1.bias)), net.fc2.weight, net.fc2.bias))
    assert torch.equal(net(x), f.linear(y, net.fc3.weight, net.fc3.bias))
