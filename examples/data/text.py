"""Text of any length: a collate function pads each batch to its longest sample.

    python examples/data/text.py
    torchrun --nproc-per-node 2 examples/data/text.py

The text is that of Python's own documentation strings; told apart is the package that one comes from.
"""

import ast
import importlib.util
import pathlib
import re

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import hapi

PACKAGES = ["email", "asyncio", "unittest"]
WORDS = 2000


def sentences():
    """(words, package number) of each documentation string, in an order that is the same everywhere."""
    for label, package in enumerate(PACKAGES):
        folder = pathlib.Path(importlib.util.find_spec(package).origin).parent
        for path in sorted(folder.glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    yield re.findall(r"[a-z]+", text.lower()) or ["none"], label


def numbered(words):
    # 0 is what pads. The same number for a word in every process, unlike Python's hash.
    return torch.tensor([1 + sum(map(ord, word)) * 31 % (WORDS - 1) for word in words])


def collate(samples):
    """A batch: (B, longest) word numbers and (B,) labels."""
    tokens, labels = zip(*samples, strict=True)
    return pad_sequence(tokens, batch_first=True), torch.tensor(labels)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(WORDS, 32, mode="mean", padding_idx=0)
        self.head = nn.Linear(32, len(PACKAGES))

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


hapi.seed(0)
samples = [(numbered(words), label) for words, label in sentences()]
test, train = samples[::5], [sample for number, sample in enumerate(samples) if number % 5]

net = Bag()
model = hapi.Model(net).prepare(
    torch.optim.Adam(net.parameters(), lr=1e-2), nn.CrossEntropyLoss(), hapi.metrics.Accuracy()
)
model.fit(
    DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate),
    DataLoader(test, batch_size=16, collate_fn=collate),
    epochs=5,
)
print(f"test accuracy {model.evaluate(DataLoader(test, 16, collate_fn=collate), verbose=0)['acc']:.4f}")
