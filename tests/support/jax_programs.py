"""JAX programs with optax that know nothing of gpuwarden, by name, and the steps that they make."""

MODEL = """
from functools import partial
import jax, jax.numpy as jnp, optax

optimizer = optax.adam(1e-3)
X = jnp.ones((8, 3))

def make():
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    return params, optimizer.init(params)

def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)

def step(state, x=X):
    params, slots = state
    updates, slots = optimizer.update(jax.grad(loss)(params, x), slots, params)
    return optax.apply_updates(params, updates), slots

train_step = jax.jit(step)
state = make()
"""

LOOPS = {
    "jitted": ("for _ in range(7): state = train_step(state)", 7),
    "eager": ("for _ in range(5): state = step(state)", 5),
    "gradient jitted": (
        (
            "gradient = jax.jit(jax.grad(loss))\nparams, slots = state\n"
            "for _ in range(5):\n"
            "    updates, slots = optimizer.update(gradient(params, X), slots)\n"
            "    params = optax.apply_updates(params, updates)"
        ),
        5,
    ),
    "donated, of several shapes": (
        (
            "train = jax.jit(step, donate_argnums=0)\n"
            "for size in (8, 8, 4, 8, 4): state = train(state, jnp.ones((size, 3)))"
        ),
        5,
    ),
    "decorator with options": (
        (
            "@jax.jit(static_argnames='twice')\ndef train(state, twice):\n    return step(state)\n"
            "for _ in range(3): state = train(state, twice=False)\n"
            "for _ in range(3): state = train(state, twice=True)"
        ),
        6,
    ),
    "partial": (
        (
            "@partial(jax.jit, static_argnums=1)\ndef train(state, n):\n    return step(state)\n"
            "for _ in range(3): state = train(state, 2)"
        ),
        3,
    ),
    "method": (
        (
            "class Trainer:\n"
            "    @partial(jax.jit, static_argnums=0)\n"
            "    def train(self, state): return step(state)\n"
            "trainer = Trainer()\n"
            "for _ in range(4): state = trainer.train(state)"
        ),
        4,
    ),
    "jitted again in each step": ("for _ in range(4): state = jax.jit(step)(state)", 4),
    "arrays of numpy, then of the device": (
        (
            "import numpy as np\n"
            "train = jax.jit(lambda state, rate: step(state))\n"
            "state = jax.tree.map(np.asarray, state)\n"
            "for n in range(4): state = train(state, 0.1 * n)"
        ),
        4,
    ),
    "count of steps, first an int": (
        (
            "train = jax.jit(lambda state, count: (step(state), count + 1))\ncount = 0\n"
            "for _ in range(4): state, count = train(state, count)"
        ),
        4,
    ),
    "jitted within jitted": (
        (
            "inner = jax.jit(step)\n"
            "@jax.jit\ndef train(state, x): return inner(state), x.sum()\n"
            "for size in (8, 8, 4, 2): state, _ = train(state, jnp.ones((size, 3)))"
        ),
        4,
    ),
    "evaluation between": (
        (
            "evaluate = jax.jit(loss)\n"
            "for _ in range(3):\n    state = train_step(state)\n    evaluate(state[0], X)\n    jnp.dot(X, X.T)"
        ),
        3,
    ),
    "two networks, one step": (
        (
            "@jax.jit\ndef train(one, other):\n"
            "    params, slots = other\n"
            "    updates, slots = optimizer.update(params, slots)\n"
            "    return step(one), (optax.apply_updates(params, updates), slots)\n"
            "other = {'v': jnp.ones(5)}\n"
            "other = other, optimizer.init(other)\n"
            "for _ in range(4): state, other = train(state, other)"
        ),
        4,
    ),
    "two networks, two functions": (
        (
            "first, second = jax.jit(step), jax.jit(lambda state: step(state))\n"
            "other = make()\n"
            "for _ in range(4): state, other = first(state), second(other)"
        ),
        4,
    ),
    "two networks, eager": ("other = make()\nfor _ in range(4): state, other = step(state), step(other)", 4),
    "ensemble": (
        (
            "states = jax.tree.map(lambda each: jnp.stack([each] * 3), state)\n"
            "train = jax.jit(jax.vmap(step))\nfor _ in range(3): states = train(states)"
        ),
        3,
    ),
    "without jit": ("with jax.disable_jit():\n    for _ in range(3): state = train_step(state)", 3),
    "error in a step": (
        (
            "for _ in range(2): state = train_step(state)\n"
            "try:\n    train_step(state, jnp.ones((8, 7)))\nexcept TypeError:\n    pass\n"
            "state = train_step(state)"
        ),
        3,
    ),
}

UNCOUNTED = {  # the steps that are counted before it is known that they cannot be
    "scan": (
        (
            "@jax.jit\ndef epoch(state): return jax.lax.scan(lambda state, x: (step(state), 0), state, X)[0]\n"
            "for _ in range(3): state = epoch(state)"
        ),
        0,
        "within lax.scan, while_loop or cond",
    ),
    "jitted step in a scan": (
        (
            "@jax.jit\ndef epoch(state): return jax.lax.fori_loop(0, 5, lambda _, state: train_step(state), state)\n"
            "for _ in range(3): state = epoch(state)"
        ),
        0,
        "within lax.scan, while_loop or cond",
    ),
    "jitted step in a scan later": (
        (
            "state = train_step(state)\n"
            "@jax.jit\ndef epoch(state): return jax.lax.fori_loop(0, 5, lambda _, state: train_step(state), state)\n"
            "for _ in range(3): state = epoch(state)"
        ),
        1,
        "within lax.scan, while_loop or cond",
    ),
    "scan that is not jitted": (
        "state, _ = jax.lax.scan(lambda state, x: (train_step(state), 0), state, jnp.zeros(10))",
        0,
        "traced outside the call",
    ),
    "traced before": (
        "train_step.lower(state).compile()\nfor _ in range(3): state = train_step(state)",
        0,
        "traced outside the call",
    ),
    "unrolled": (
        "train = jax.jit(lambda state: step(step(step(state))))\nfor _ in range(3): state = train(state)",
        0,
        "several times",
    ),
    "twins": (
        (
            "train = jax.jit(lambda one, other: (step(one), step(other)))\nother = make()\n"
            "for _ in range(3): state, other = train(state, other)"
        ),
        0,
        "several times",
    ),
    "switch": (
        (
            "@partial(jax.jit, static_argnames='train')\n"
            "def call(state, train): return step(state) if train else state\n"
            "for _ in range(3): state = call(state, train=True)\n"
            "for _ in range(3): state = call(state, train=False)\n"
            "for _ in range(3): state = call(state, train=True)"
        ),
        3,
        "in some of its calls only",
    ),
    "switch, first off": (
        (
            "@partial(jax.jit, static_argnames='train')\n"
            "def call(state, train): return step(state) if train else state\n"
            "for _ in range(3): state = call(state, train=False)\n"
            "for _ in range(3): state = call(state, train=True)"
        ),
        0,
        "in some of its calls only",
    ),
}
