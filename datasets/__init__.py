"""Image classification data in memory: MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100.

Files are read with the standard library and torch alone; torchvision is imported only to download, and only
then.
"""

from __future__ import annotations

# The folder `datasets/` of the repository is the source of this package. Where the repository is the current
# folder, it hides any other package of the name `datasets`: that must be said, not left to a puzzling
# AttributeError.
if __name__ != "hapi.datasets":
    raise ImportError(
        f"The source folder of hapi.datasets was imported as {__name__!r}: it lies first on the module path "
        "and hides the package of that name that may have been meant. Write `from hapi.datasets import MNIST`"
        " for these data sets; for the other package run `python -P`, or start from another folder."
    )

from hapi.datasets.cifar import CIFAR10, CIFAR100
from hapi.datasets.mnist import MNIST, FashionMNIST

__all__ = ["CIFAR10", "CIFAR100", "MNIST", "FashionMNIST"]
