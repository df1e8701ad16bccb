"""Train with torch, and again with a smaller batch if memory runs out: `python examples/retry_loop.py`.

Runs on a GPU if torch has one, else on the CPU, with or without a daemon. If all fits, it trains once.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from gpuwarden import watch, with_oom_retry

EPOCHS = 3
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(8192, 32)
y = x.sum(dim=1, keepdim=True)

model = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters())
folder = TemporaryDirectory()
checkpoint = Path(folder.name, "last.pt")
done = 0  # epochs


def save(epochs: int) -> None:
    """Save the state after some epochs."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}, checkpoint)


def restore() -> None:
    """Load the last checkpoint."""
    global done  # noqa: PLW0603 - part of the state
    state = torch.load(checkpoint, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["epochs"]


@with_oom_retry(batch_size=1024, restore=restore)
def train(batch_size: int) -> None:
    """Train the epochs that are left."""
    with watch("retry loop") as run:
        for epoch in run.epochs(range(done, EPOCHS)):
            for batch, target in zip(x.split(batch_size), y.split(batch_size), strict=True):
                loss = torch.nn.functional.mse_loss(model(batch.to(device)), target.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(batch_size=len(batch))
            save(epoch + 1)
            print(f"epoch {epoch}: batch size {batch_size}, loss {loss.item():.3f}")


save(0)
train()
folder.cleanup()
