"""Report a plain torch loop: epochs, steps, input wait, validation, and the memory of torch's GPUs.

Runs on a GPU if torch has one, else on the CPU, with or without a daemon: `python examples/torch_loop.py`. With
torchrun, each process is a run, with its rank.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from gpuwarden import watch

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(4096, 32)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
training, validation = DataLoader(data, batch_size=64, shuffle=True), DataLoader(data, batch_size=512)

model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters())
error = torch.nn.MSELoss()

with watch("torch loop") as run:
    for epoch in run.epochs(3):
        for batch, target in run.batches(training):
            loss = error(model(batch.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(batch_size=len(batch))
        with run.phase("test"), torch.no_grad():
            losses = [error(model(batch.to(device)), target.to(device)).item() for batch, target in validation]
        print(f"epoch {epoch}: {sum(losses) / len(losses):.3f}")
