"""Paddle's recipe "a regression net by fleet", for PyTorch, with the calls of Paddle's older scripts left in.

    python examples/paddle/fleet_regression.py
    torchrun --nproc-per-node 2 examples/paddle/fleet_regression.py

Prints a loss below 0.1 and equal weights on every rank. A second on a CPU.
"""

import torch
from torch import nn

from hapi.distributed import fleet

fleet.init(is_collective=True)

layer = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))
dp_layer = fleet.distributed_model(layer)
optimizer = fleet.distributed_optimizer(torch.optim.Adam(dp_layer.parameters(), lr=0.01))

torch.manual_seed(fleet.worker_index())
for _ in range(300):
    inputs = torch.randn(32, 10)
    labels = inputs.sum(dim=1, keepdim=True)
    loss = nn.functional.mse_loss(dp_layer(inputs), labels)
    loss = dp_layer.scale_loss(loss)
    loss.backward()
    dp_layer.apply_collective_grads()
    optimizer.step()
    optimizer.zero_grad()

fleet.barrier_worker()
checksum = sum(parameter.sum().item() for parameter in layer.parameters())
print(
    f"worker {fleet.worker_index()} of {fleet.worker_num()}: loss {loss.item():.4f}, weights {checksum:.6f}\n", end=""
)
