"""CIFAR-10 in seconds on a large card: a small residual network, large batches, one cycle of the learning rate.

    python examples/cifar10_fast.py                                 15 epochs
    python examples/cifar10_fast.py 2 32                            two epochs of 32 images, to see it run on a CPU
    torchrun --nproc-per-node 2 examples/cifar10_fast.py            two processes, with the same file

Aims at 94 % test accuracy in less than 10 seconds of training on an H100. Not yet run on a card: neither is measured.
Nothing in it is a loop of its own: crops and mirroring are done on the card, a batch at a time, by hapi.datasets.
"""

import sys
import time

import torch
from torch import nn
from torch.utils.data import Subset
from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

import hapi
from hapi.datasets import CIFAR10

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
samples = int(sys.argv[2]) if len(sys.argv) > 2 else 50_000
BATCH_SIZE = 512  # over all processes
if not torch.cuda.is_available():
    print("No card here: this shows that the script runs. Neither its time nor its accuracy say anything.")
hapi.seed(0)
torch.backends.cudnn.benchmark = True


def conv(inputs, outputs, *pool):  # pooled first: a quarter is left to normalize
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(layer, *pool, nn.BatchNorm2d(outputs), nn.CELU(0.1))


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            conv(3, 64),
            conv(64, 128, nn.MaxPool2d(2)),  # 32 x 32 -> 16 x 16
            Residual(conv(128, 128), conv(128, 128)),
            conv(128, 256, nn.MaxPool2d(2)),  # -> 8 x 8
            conv(256, 512, nn.MaxPool2d(2)),  # -> 4 x 4
            Residual(conv(512, 512), conv(512, 512)),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.classify = nn.Linear(512, 10, bias=False)

    def forward(self, images):
        images = images.contiguous(memory_format=torch.channels_last)
        scores = self.classify(self.features(images))
        if not self.training:  # the mean with the mirrored image's scores
            scores = (scores + self.classify(self.features(images.flip(-1)))) / 2
        return scores / 8  # large weights learn too fast for a softmax


normalize = Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
augment = Compose([RandomCrop(32, padding=4), RandomHorizontalFlip(), ToTensor(), normalize])
train = Subset(CIFAR10(mode="train", transform=augment), range(samples))
test = Subset(CIFAR10(mode="test", transform=Compose([ToTensor(), normalize])), range(min(samples, 10_000)))

net = Net().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)
steps = epochs * -(-samples // BATCH_SIZE)
cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, steps, anneal_strategy="linear", cycle_momentum=False)
model = hapi.Model(net).prepare(
    optimizer, nn.CrossEntropyLoss(label_smoothing=0.2), hapi.metrics.Accuracy(), amp_configs="bf16", scheduler=cycle
)
model.evaluate(test, batch_size=1000, verbose=0)  # starts the card, outside of what is timed
began = time.perf_counter()
model.fit(train, epochs=epochs, global_batch_size=BATCH_SIZE)
print(f"{time.perf_counter() - began:.1f} s of training;", model.evaluate(test, batch_size=1000, verbose=0))
