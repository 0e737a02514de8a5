"""Paddle's recipe "CIFAR-10 by fleet with a DistributedBatchSampler", for PyTorch, with validation each epoch.

    python examples/paddle/fleet_cifar10.py
    torchrun --nproc-per-node 2 examples/paddle/fleet_cifar10.py

Needs CIFAR-10 (HAPI_DATA_HOME, or a download). One epoch, at least 0.45 accuracy, about a minute on two CPU cores.
Validation by hand has to add up over the ranks; `hapi.Model` does that by itself.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from hapi.datasets import CIFAR10
from hapi.distributed import DistributedBatchSampler, fleet

EPOCHS = 1

fleet.init(is_collective=True)

network = nn.Sequential(
    *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)),
)
model = fleet.distributed_model(network)
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.001))

train_set, test_set = CIFAR10(mode="train"), CIFAR10(mode="test")
sampler = DistributedBatchSampler(train_set, batch_size=32, shuffle=True, drop_last=True)
train_loader = DataLoader(train_set, batch_sampler=sampler)
test_loader = DataLoader(test_set, batch_sampler=DistributedBatchSampler(test_set, batch_size=32))

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    model.train()
    for step, (images, labels) in enumerate(train_loader):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 500 == 0 and fleet.is_first_worker():
            print(f"epoch {epoch}, step {step}, loss {loss.item():.4f}\n", end="")

    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, labels in test_loader:
            counts += torch.tensor([(network(images).argmax(1) == labels).sum(), len(labels)])
    if fleet.worker_num() > 1:
        torch.distributed.all_reduce(counts)
    if fleet.is_first_worker():
        print(f"epoch {epoch}, accuracy {counts[0].item() / counts[1].item():.4f}\n", end="")
