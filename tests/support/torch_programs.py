"""torch programs that know nothing of gpuwarden, by name: source, and the steps that they make."""

MODEL = """
import torch
torch.manual_seed(1)
torch.set_num_threads(1)
X, Y = torch.ones(4, 3), torch.ones(4, 1)

def make(kind=torch.optim.SGD, **settings):
    model = torch.nn.Linear(3, 1)
    return model, kind(model.parameters(), lr=0.01, **settings)

def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(X), Y).backward()
        optimizer.step()
"""

LOOPS = {
    "plain": ("train(*make(), 4)", 4),
    "adam": ("train(*make(torch.optim.Adam), 4)", 4),
    "accumulation": (
        """
model, optimizer = make()
for batch in range(12):
    torch.nn.functional.mse_loss(model(X), Y).backward()
    if batch % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
        3,
    ),
    "scheduler": (
        """
model, optimizer = make()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for _ in range(4):
    train(model, optimizer)
    scheduler.step()
""",
        4,
    ),
    "lbfgs": (
        """
model, optimizer = make(torch.optim.LBFGS)
def closure():
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(X), Y)
    loss.backward()
    return loss
for _ in range(3):
    optimizer.step(closure)
""",
        3,
    ),
    "subclass": (
        """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)
train(*make(Own), 4)
""",
        4,
    ),
    "optimizer in an optimizer": (
        """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
    def step(self, closure=None):
        return self.inner.step(closure)
model, optimizer = make()
train(model, Lookahead(optimizer), 4)
""",
        4,
    ),
    "gan": (
        """
generator, discriminator = make(torch.optim.Adam), make(torch.optim.Adam)
for _ in range(5):
    train(*discriminator)
    train(*generator)
""",
        5,
    ),
    "an optimizer for each parameter": (
        """
model, _ = make()
optimizers = [torch.optim.SGD([each], lr=0.01) for each in model.parameters()]
for _ in range(4):
    torch.nn.functional.mse_loss(model(X), Y).backward()
    for each in optimizers:
        each.step()
""",
        4,
    ),
    "one model after the other": ("first, second = make(), make()\ntrain(*first, 8)\ntrain(*second, 6)", 14),
    "turns": (
        """
actor, critic = make(), make()
for _ in range(3):
    train(*actor, 10)
    train(*critic, 10)
""",
        60,
    ),
    "closure raises": (
        """
model, optimizer = make()
def fail():
    raise KeyError("closure")
for _ in range(3):
    try:
        optimizer.step(fail)
    except KeyError:
        train(model, optimizer)
""",
        3,
    ),
    "forked child": (
        """
import os
train(*make(), 4)
child = os.fork()
if child == 0:
    train(*make(), 7)
    raise SystemExit
os.waitpid(child, 0)
""",
        4 + 7,
    ),
    "loader workers": (
        """
if __name__ == "__main__":
    model, optimizer = make()
    data = torch.utils.data.TensorDataset(X.repeat(4, 1), Y.repeat(4, 1))
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="spawn"):
        train(model, optimizer)
""",
        4,
    ),
    "own watch": (
        """
from gpuwarden import watch
with watch("own") as run:
    model, optimizer = make()
    for _ in range(4):
        train(model, optimizer)
        run.step()
""",
        4,
    ),
}
