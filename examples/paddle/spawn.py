"""Paddle's recipe "data parallel by spawn" in its four forms, for PyTorch.

    python examples/paddle/spawn.py

Functions of the script itself are sent by value, which needs the package cloudpickle (the extra of that name).
Prints, for each form, what the processes returned: weights that are equal in all of them. Twenty seconds on two cores.
"""

import torch
from torch import nn

import hapi.distributed as dist


def train(print_result=False):
    dist.init_parallel_env()
    torch.manual_seed(dist.get_rank())
    layer = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 1))
    dp_layer = dist.DataParallel(layer)
    adam = torch.optim.Adam(dp_layer.parameters(), lr=0.001)

    loss = nn.functional.mse_loss(dp_layer(torch.randn(10, 10)), torch.randn(10, 1))
    loss.backward()
    if print_result:
        print(f"rank {dist.get_rank()}: loss {loss.item():.4f}\n", end="")
    adam.step()
    return round(sum(parameter.sum().item() for parameter in layer.parameters()), 6)


# 1. The function alone: one process a card, or one a CPU core.
print(dist.spawn(train))

# 2. With arguments.
print(dist.spawn(train, args=(True,)))

# 3. With arguments and a number of processes.
print(dist.spawn(train, args=(True,), nprocs=2))

# 4. With arguments, a number of processes, and the cards (here none, "cpu"; with cards "0,1").
print(dist.spawn(train, args=(True,), nprocs=2, gpus="0,1" if torch.cuda.device_count() > 1 else "cpu"))
