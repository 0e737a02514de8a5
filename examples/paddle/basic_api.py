"""Paddle's recipe "data parallel by the basic API", for PyTorch: two layers, random data, a loop of one's own.

    python examples/paddle/basic_api.py
    torchrun --nproc-per-node 2 examples/paddle/basic_api.py

Prints each rank's loss after 20 steps, and weights that are equal on every rank. A second on a CPU.
"""

import torch
from torch import nn

import hapi.distributed as dist


class LinearNet(nn.Module):
    def __init__(self):
        super().__init__()
        self._linear1 = nn.Linear(10, 10)
        self._linear2 = nn.Linear(10, 1)

    def forward(self, x):
        return self._linear2(self._linear1(x))


dist.init_parallel_env()

torch.manual_seed(dist.get_rank())
layer = LinearNet()
dp_layer = dist.DataParallel(layer)
loss_fn = nn.MSELoss()
adam = torch.optim.Adam(dp_layer.parameters(), lr=0.001)

for _ in range(20):
    inputs = torch.randn(10, 10)
    labels = torch.randn(10, 1)
    loss = loss_fn(dp_layer(inputs), labels)
    loss.backward()
    adam.step()
    adam.zero_grad()

checksum = sum(parameter.sum().item() for parameter in layer.parameters())
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.4f}, weights {checksum:.6f}\n", end="")
