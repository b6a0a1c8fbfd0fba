import torch

from net import Net

# The weights of the network of the PyTorch tutorial
SHAPES = {
    "conv1.weight": (6, 3, 5, 5),
    "conv2.weight": (16, 6, 5, 5),
    "fc1.weight": (120, 400),
    "fc2.weight": (84, 120),
    "fc3.weight": (7, 84),
}


def test_the_network_is_the_tutorials():
    torch.manual_seed(0)
    net, x = Net(7), torch.randn(3, 3, 32, 32)
    assert {k: tuple(each.shape) for k, each in net.named_parameters() if "bias" not in k} == SHAPES
    f = torch.nn.functional
    y = f.max_pool2d(f.relu(f.conv2d(x, net.conv1.weight, net.conv1.bias)), 2)
    y = f.max_pool2d(f.relu(f.conv2d(y, net.conv2.weight, net.conv2.bias)), 2).flatten(1)
    y = f.relu(f.linear(f.relu(f.linear(y, net.fc1.weight, net.fc1.bias)), net.fc2.weight, net.fc2.bias))
    assert torch.equal(net(x), f.linear(y, net.fc3.weight, net.fc3.bias))
