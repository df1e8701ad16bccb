"""Situations and their labels, which people gave before there were rules that could give them.

The label of an out-of-memory error is a cause, which can be tested: without the cause and with all else equal, the
training passes, or, if it is too big, still fails (`python bench/situations.py --verify`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Label = Literal[
    "too_big", "batch_too_large", "leak", "fragmentation", "neighbour", "phase_peak", "host_input", "unknown"
]
LABELS: tuple[Label, ...] = (
    "too_big", "batch_too_large", "leak", "fragmentation", "neighbour", "phase_peak", "host_input", "unknown",
)  # fmt: skip


LONGER = 8


@dataclass(frozen=True, slots=True)
class Situation:
    """Training process on a device of `size` MiB.

    `label` is the cause of its out-of-memory error, None: there is none. `grows` says where memory leaks. `limit` is the
    allocator's own, in MiB, `host_limit` the container's. `neighbour` are the pieces, MEBIBYTES:SECONDS, that another
    process allocates, after the training process has started or, `early`, before. `pace` is the daemon's and the
    callback's. A situation that `dies` ends without Python's own end, which its broken allocator would not survive. One
    that is `longer` has that many times the steps. `expert` is the next step that an engineer would give, `says` and
    `never` are patterns that the daemon's next step has and has not.
    """

    program: Literal["ooms", "leaks", "healthy", "more_ooms", "paced_leaks", "unseen", "unseen_second", "unseen_third"]
    name: str
    why: str
    label: Label | None = None
    grows: Literal["device", "host"] | None = None
    size: int = 256
    limit: int | None = None
    host_limit: int | None = None
    neighbour: tuple[str, ...] = ()
    early: bool = False
    pace: Literal["fast", "default"] = "fast"
    dies: bool = False
    longer: int = 1
    function: str | None = None  # of the program, where it is not the name
    expert: str = ""
    says: str = ""
    never: str = r"(?!)"


def _oom(label: Label | None, name: str, why: str, **settings: object) -> Situation:
    return Situation("ooms", name, why, label, **settings)  # type: ignore[arg-type] # passed on


def _more(label: Label, name: str, why: str, **settings: object) -> Situation:
    return Situation("more_ooms", name, why, label, **settings)  # type: ignore[arg-type] # likewise


def _unseen(label: Label, name: str, why: str, expert: str, **settings: object) -> Situation:
    return Situation("unseen", name, why, label, expert=expert, **settings)  # type: ignore[arg-type] # likewise


def _second(label: Label, name: str, why: str, expert: str, **settings: object) -> Situation:
    return replace(_unseen(label, name, why, expert, **settings), program="unseen_second")


def _third(label: Label, name: str, why: str, expert: str, **settings: object) -> Situation:
    return replace(_unseen(label, name, why, expert, **settings), program="unseen_third")


def _leak(name: str, why: str, **settings: object) -> Situation:
    return Situation("leaks", name, why, **{"label": "leak", "grows": "device"} | settings)  # type: ignore[arg-type]


def _paced(name: str, why: str, **settings: object) -> Situation:
    return Situation("paced_leaks", name, why, **{"label": "leak", "grows": "device"} | settings)  # type: ignore[arg-type]


def _healthy(name: str, why: str, **settings: object) -> Situation:
    return Situation("healthy", name, why, **settings)  # type: ignore[arg-type] # likewise


OOMS = (
    _oom("too_big", "too_big_embedding", "a table of 488 MiB on a device of 256", pace="default"),
    _oom("too_big", "too_big_optimizer", "weights, gradient and Adam's two slots, 65 MiB each, on 240"),
    _oom("too_big", "too_big_gradient", "the gradient of weights of 61 MiB next to Adam's two slots on 240, in a pool that grows"),
    _oom("too_big", "too_big_sequence", "one sequence's attention of 381 MiB on a device of 256"),
    _oom("too_big", "too_big_limited", "the same weights under the allocator's own limit", function="too_big_gradient", size=1024, limit=200),
    _oom("batch_too_large", "batch_first_step", "activations of 781 MiB in the first step", pace="default"),
    _oom("batch_too_large", "batch_deep", "activations of six wide layers, 64 MiB each, in the first step"),
    _oom("batch_too_large", "batch_second_fit", "a second fit with a batch 128 times as large"),
    _oom("batch_too_large", "batch_own_loop", "activations of 188 MiB, twice, in a custom loop, in a pool that grows"),
    _oom("batch_too_large", "batch_jit", "compiled by XLA, whose message has no shape", dies=True),
    _oom("batch_too_large", "batch_images", "images, 128 a batch, where 4 fit"),
    _oom("batch_too_large", "batch_limited", "the same images under the allocator's own limit", function="batch_images", size=2048, limit=200),
    _oom("fragmentation", "fragmented_halves", "every second tensor of a bank is dropped", pace="default"),
    _oom("fragmentation", "fragmented_cache", "entries of a cache come and go"),
    _oom("fragmentation", "fragmented_regions", "a pool grew in pieces, none of which is large enough"),
    _oom("fragmentation", "fragmented_pins", "small tensors stay between large ones that were freed"),
    _oom("neighbour", "neighbour_sudden", "another process allocates 170 MiB before a larger model is built", neighbour=("170:4",), pace="default"),
    _oom("neighbour", "neighbour_before", "another process has 190 MiB when training starts", neighbour=("190",), early=True),
    _oom("neighbour", "neighbour_gradual", "another process allocates 40 MiB a second", neighbour=tuple(f"40:{0.5 + 0.9 * each:.1f}" for each in range(5))),
    _oom("neighbour", "neighbour_preallocating", "another process leaves little to preallocate", neighbour=("170",), early=True),
    _oom("neighbour", "neighbour_validation", "another process starts before the first validation", neighbour=("180:3",)),
    _oom("phase_peak", "peak_validation", "validation has a batch 300 times training's", pace="default"),
    _oom("phase_peak", "peak_predict", "prediction has all in one batch"),
    _oom("phase_peak", "peak_giant_batch", "one batch in 441 is 234 times the others"),
    _oom("phase_peak", "peak_own_phase", "a test phase of a custom loop has a giant batch"),
    _oom("phase_peak", "peak_late_validation", "validation in every fourth epoch has a giant batch, in a pool that grows"),
    _oom("host_input", "input_map", "tf.data's map makes a tensor of 1.2 GiB"),
    _oom("host_input", "input_later", "the same, in the 250th batch"),
    _oom("host_input", "input_generator", "a generator requests terabytes from NumPy"),
    _oom("host_input", "input_pydataset", "a PyDataset does the same", pace="default"),
    _oom("host_input", "input_own_loader", "the loader of a custom loop does the same"),
    _oom("unknown", "unknown_refusal", "the driver refuses though memory is free"),
    _oom(None, "unknown_quota", "an error that says nothing, raised by hand"),
    _oom("unknown", "unknown_device", "a GPU that the daemon does not have"),
)  # fmt: skip

LEAKS = (
    _leak("leak_step", "a tensor a step"),
    _leak("leak_epoch", "a copy an epoch"),
    _leak("leak_validation", "outputs of validation only"),
    _leak("leak_variable", "something of each batch, whose sizes vary"),
    _leak("leak_staircase", "a snapshot every fourth epoch"),
    _leak("leak_slow", "slower, at default settings", pace="default"),
    _leak("leak_growing_pool", "a tensor a step, in a pool that grows"),
    _leak("leak_limited", "the same, under the allocator's own limit", function="leak_growing_pool", size=1024, limit=240),
    _leak("leak_history", "losses with their features, in a custom loop", pace="default"),
    _leak("leak_folds", "models of a cross-validation in graph mode"),
    _leak("leak_host", "arrays in Python, in a container", label=None, grows="host", host_limit=1600),
    _leak("leak_host_worker", "arrays in the input's own process, in a container", label=None, grows="host", host_limit=1600),
)  # fmt: skip

HEALTHY = (
    _healthy("one_time_steps", "two jumps of 30 MiB"),
    _healthy("late_optimizer_slots", "Adam's slots appear in the middle"),
    _healthy("unfreezing", "more and more layers are trained"),
    _healthy("retracing", "24 shapes, each traced"),
    _healthy("bucketed_lengths", "batches of five sizes at random", pace="default"),
    _healthy("longer_and_longer", "batches grow within each epoch"),
    _healthy("sawtooth_in_epochs", "freed at each epoch's end"),
    _healthy("sawtooth_over_epochs", "freed in every fifth epoch"),
    _healthy("nearly_full", "95 % in use, in a preallocated pool", pace="default"),
    _healthy("nearly_full_growing_pool", "a full device, in a pool that grew"),
    _healthy("cache_of_the_first_epoch", "tf.data's cache of 60 MiB"),
    _healthy("least_recently_used", "a cache with fewer and fewer new entries"),
    _healthy("folds_eagerly", "12 models that run eagerly"),
    _healthy("turns", "fit, evaluate, predict, 12 times"),
    _healthy("validated", "validation in larger batches"),
    _healthy("several_steps_an_execution", "eight steps an execution"),
    _healthy("mixed_batches", "batches of three sizes"),
    _healthy("checkpoints", "written each epoch, read back twice", pace="default"),
    _healthy("losses_as_floats", "numbers kept in Python"),
    _healthy("history_in_python", "a small record a step in Python"),
    _healthy("average_of_weights", "an average from the middle on"),
    _healthy("moving_average_by_keras", "Keras's own average"),
    _healthy("warm_up_of_batches", "batches double through the first third"),
    _healthy("own_loop", "a loop without epochs, in a pool that grows", pace="default"),
    _healthy("shuffling_buffer", "a loader's buffer fills"),
    _healthy("shuffled_by_tensorflow", "tf.data's buffer, refilled each epoch"),
    _healthy("workers_of_the_input", "two processes that read"),
    _healthy("mapped_file", "300 MiB of a file become resident"),
    _healthy("garbage_in_cycles", "host memory as a sawtooth"),
    _healthy("accumulated_gradients", "gradients over eight steps"),
    _healthy("replay_memory", "a buffer fills in the first quarter"),
    _healthy("one_long_epoch", "one epoch of unknown length"),
    _healthy("short_epochs", "epochs of three steps"),
)  # fmt: skip

# Written after the rules, by a person who had read their documentation, but not the rules.
MORE = (
    _more("too_big", "big_convolution", "a convolution of 81 MiB with gradient and momentum on 240", pace="default"),
    _more("too_big", "big_vocabulary", "an embedding of 85 MiB with Adam's two slots on 240"),
    _more("batch_too_large", "batch_of_sequences", "a recurrent layer keeps 1 MiB a dozen times for each of 100 times"),
    _more("batch_too_large", "batch_searched", "a batch is doubled until it does not fit, in half precision"),
    _more("leak", "leak_of_predictions", "outputs are appended to a list, in a compiled custom loop", pace="default"),
    _more("leak", "leak_of_weights", "a callback keeps the weights of each epoch"),
    _more("leak", "leak_of_variables", "a list of variables grows, with two models by turns"),
    _more("fragmentation", "fragmented_buffer", "three fifths of a buffer of mixed sizes are dropped"),
    _more("fragmentation", "fragmented_ensemble", "every second model of an ensemble is dropped"),
    _more("neighbour", "neighbour_in_mid_epoch", "another process starts in mid epoch, before the longest batches", neighbour=("200:3",)),
    _more("neighbour", "neighbour_beside_images", "another process has 190 MiB before", neighbour=("190",), early=True, pace="default"),
    _more("phase_peak", "peak_larger_images", "validation has images of 400 times the area"),
    _more("phase_peak", "peak_evaluation", "evaluation after a loop of fits has all in one batch"),
    _more("host_input", "input_shuffled", "tf.data's shuffling buffer holds 600 MiB"),
    _more("host_input", "input_cached", "tf.data's cache holds 600 MiB, in the first epoch"),
    _more("unknown", "unknown_by_turns", "the driver refuses though memory is free, with two models by turns"),
)  # fmt: skip

# Written after the rules, by a person who had read neither them nor their documentation. The clock sets their rate, so that
# load on a shared machine does not change it.
PACED = (
    _paced("paced_step", "embeddings a step, in Keras's fit", pace="default", size=188),
    _paced("paced_losses", "losses with their tapes, in a custom loop", size=208),
    _paced("paced_activations", "activations every third step, under the allocator's own limit", pace="default", size=1024, limit=240),
    _paced("paced_predictions", "predictions of each validation"),
    _paced("paced_weights", "the whole state every third epoch", pace="default"),
    _paced("paced_cache", "a cache by shape, whose shapes never recur", size=208),
    _paced("paced_queue", "a queue that is filled faster than it is emptied", pace="default", size=208),
    _paced("paced_variables", "variables and an optimizer's slots for each task, in a pool that grows", size=176),
    _paced("paced_sawtooth", "a little of each step, next to a sawtooth of 60 MiB", pace="default", size=294),
    _paced("paced_late", "images, from the eleventh epoch on", size=188),
    _paced("paced_batches", "a table a step, with batches of all sizes", pace="default"),
    _paced("paced_host", "arrays that a loader keeps, in a container", label=None, grows="host", host_limit=1100),
)  # fmt: skip


def _longer(paced: Situation, *, fixed: int = 0, process: int = 350) -> Situation:
    """Let the same leak fill eight times the memory.

    Of it `fixed` MiB are the training's other memory, and `process` those of TensorFlow itself in a container.
    """
    return replace(
        paced,
        name=paced.name.replace("paced", "long"),
        function=paced.name,
        size=(paced.size - fixed) * LONGER + fixed,
        limit=paced.limit and paced.limit * LONGER,
        host_limit=paced.host_limit and (paced.host_limit - process) * LONGER + process,
        longer=LONGER,
    )


LONG = tuple(_longer(each, fixed=100 if each.name == "paced_sawtooth" else 0) for each in PACED)

# Written on 2026-11-25, before the rules were changed for it, by a person who had not read their code. Without its cause,
# what is `too_big` has a batch of one. A situation is right if cause and next step are.
_BATCH, _MODEL = r"batch", r"model|optimizer|precision|layers"
UNSEEN = (
    _unseen(
        "too_big", "unfrozen", "unfreezing adds gradients and Adam's slots for 50 MiB of weights",
        "What is trained has grown: unfreeze fewer layers, an optimizer with less state, lower precision.",
        says=_MODEL, never=_BATCH, size=208,
    ),
    _unseen(
        "too_big", "late_optimizer", "Adam's slots are made after 250 steps of SGD",
        "The optimizer's state does not fit: one with less state, or a smaller model.",
        says="optimizer", never=_BATCH, size=208,
    ),
    _unseen(
        "too_big", "accumulators", "variables to accumulate six tasks' gradients are made after 200 steps, outside of a step",
        "Weights, slots and accumulators do not fit together: fewer of them, lower precision, a smaller model.",
        says=_MODEL, never=_BATCH,
    ),
    _unseen(
        "too_big", "table_at_build", "an embedding of 366 MiB, made before any step",
        "The table alone is larger than the device: fewer rows or columns, hashing, lower precision.",
        says=_MODEL + "|tensor", never=_BATCH, pace="default",
    ),
    _unseen(
        "too_big", "teacher", "a second model of 196 MiB is built after training, next to 50 MiB with Adam",
        "Two models do not fit: free the first, a smaller second, lower precision.",
        says=_MODEL, never=_BATCH, size=224,
    ),
    _unseen(
        "too_big", "own_memory_limit", "weights and Adam exceed the process's own limit of 160 MiB on a device of 1024",
        "The memory limit of the process is what is full: raise it.",
        says="limit", never=_BATCH, size=1024, limit=160,
    ),
    _unseen(
        "too_big", "distances", "NumPy, in the user's code, is asked for 29 TiB",
        "No host has that: check shape and dtype, or compute it in pieces.",
        says="shape|dtype|pieces|parts", never="pipeline|shuffle|worker|batch",
    ),
    _unseen(
        "too_big", "jax_table", "JAX is asked for 16 TiB in one array",
        "One array is larger than any device: check its shape, or shard it.",
        says="shape|" + _MODEL, never=_BATCH,
    ),
    _unseen(
        "batch_too_large", "heads", "192 MiB of attention scores in batches of 12",
        "A smaller batch, a few examples fit.", says=_BATCH,
    ),
    _unseen(
        "batch_too_large", "half_precision", "convolutions in mixed precision with a batch of 192, where 2 fit",
        "A smaller batch.", says=_BATCH, size=160,
    ),
    _unseen(
        "batch_too_large", "xla_step", "188 MiB of activations twice, in a step that XLA compiles",
        "A smaller batch.", says=_BATCH, dies=True,
    ),
    _unseen(
        "leak", "kept_gradients", "a list of each micro batch's gradients",
        "Add gradients up instead of keeping them.", says="keep|kept|list", never=_BATCH,
    ),
    _unseen(
        "leak", "kept_outputs", "validation keeps each batch's features on the device",
        "Copy what is kept to the host.", says="keep|kept|list",
    ),
    _unseen(
        "phase_peak", "long_document", "one document of 6000 tokens, where others have 128",
        "Bound or bucket the lengths.", says="length|sequence|shape|largest|that",
    ),
    _unseen(
        "phase_peak", "large_evaluation", "evaluation has a batch 1250 times as large, outside of the watch's steps",
        "A smaller batch for the evaluation.", says=_BATCH,
    ),
    _unseen(
        "phase_peak", "all_at_once", "the model is called on all examples at once after training",
        "Predict in batches.", says=_BATCH,
    ),
    _unseen(
        "host_input", "prefetched", "tf.data prefetches 4000 batches of 1 MiB",
        "A smaller prefetch buffer.", says="prefetch", never="model",
    ),
    _unseen(
        "host_input", "one_hot", "tf.data encodes a batch one-hot, 1 GiB",
        "Encode in the model, or as indices.", says="input|pipeline|buffer|shape", never="model",
    ),
    _unseen(
        "neighbour", "co_tenant_grows", "another process grows by 12 MiB a second",
        "Move one of the two.", says="GPU|process", never=_BATCH,
        neighbour=tuple(f"12:{2 + each}" for each in range(16)),
    ),
    _unseen(
        "fragmentation", "mixed_lengths", "two of three texts of mixed lengths are dropped",
        "Another allocator, or buffers allocated at first.", says="alloc|fragment", never=_BATCH,
    ),
)  # fmt: skip

# Written on 2026-11-25, after the rules were changed for the third set, by a person who had read neither them nor what was
# written about them. Labels and next steps are of before the first play. What is `too_big` has one example without its cause.
_LESS_BATCH = r"(smaller|lower|reduce|halve)\W+(the |your )?batch"
SECOND = (
    _second(
        "batch_too_large", "volumes", "activations of 64 volumes in the first step, where 2 fit",
        "A smaller batch, or smaller volumes.", says=_BATCH,
    ),
    _second(
        "batch_too_large", "contrastive", "pairs of a batch that is 16 times as large: 256 times the memory",
        "A smaller batch.", says=_BATCH,
    ),
    _second(
        "batch_too_large", "finetuned", "unfrozen layers keep their activations; their weights are small",
        "A smaller batch than for the head alone, or fewer unfrozen layers.", says=_BATCH,
    ),
    _second(
        "too_big", "accumulated", "accumulators for 40 MiB of weights, next to Adam, though the batch is an eighth",
        "Weights, slots and accumulators do not fit: no accumulation, an optimizer with less state, lower precision.",
        says=_MODEL, never=_BATCH,
    ),
    _second(
        "too_big", "jacobian", "the derivatives of all outputs by all weights, 256 MiB an example, outside of a step",
        "One tensor does not fit: derive fewer outputs at a time.",
        says=r"tensor|shape|outputs|parts|pieces|" + _MODEL, never=_BATCH,
    ),
    _second(
        "too_big", "experts", "24 experts of 12 MiB, while the model is built",
        "The weights do not fit: fewer experts, lower precision.", says=_MODEL, never=_BATCH,
    ),
    _second(
        "too_big", "categorical_labels", "Keras's utility for labels asks NumPy for 12 TiB before the training",
        "No host has that: keep the labels as numbers (sparse loss), or encode in pieces.",
        says=r"shape|dtype|pieces|parts|sparse", never=r"pipeline|shuffle|worker|batch",
    ),
    _second(
        "phase_peak", "long_recording", "a recording of 480,000 samples, where others have 6000, pads its batch",
        "Bound or bucket the lengths.", says=r"length|sequence|shape|bound|bucket|largest",
    ),
    _second(
        "phase_peak", "scanned_page", "one picture of 1600 x 1200 where others have 112 x 112, one a step",
        "Resize or crop: the batch is one already.",
        says=r"size|length|shape|bound|crop|largest|example", never=_LESS_BATCH,
    ),
    _second(
        "phase_peak", "samples", "a callback draws 12,000 samples at once at the end of an epoch",
        "Draw them in batches.", says=_BATCH + r"|fewer|parts|pieces",
    ),
    _second(
        "phase_peak", "retrieval", "the evaluation makes a tensor of 976 MiB of pairs",
        "Compare in batches.", says=_BATCH + r"|parts|pieces",
    ),
    _second(
        "leak", "predicted_masks", "predict() keeps 400 MiB of results on the device",
        "Predict in parts, and keep results on the host.", says=r"keep|kept|list|results|outputs|parts",
    ),
    _second(
        "leak", "remembered", "the memory of a recurrent transformer grows by a segment a step",
        "Cut the memory.", says=r"keep|kept|list|grow|cache", never=_LESS_BATCH,
    ),
    _second(
        "leak", "retraced", "each step traces a graph with its own copy of a table of 1.5 MiB",
        "Pass tensors, not Python numbers.", says=r"keep|kept|list|grow|trac", never=_LESS_BATCH,
    ),
    _second(
        "leak", "trials", "results of a search keep models and optimizers, 3 to 11 MiB each",
        "Do not keep models.", says=r"keep|kept|list|grow", never=_LESS_BATCH,
    ),
    _second(
        "fragmentation", "churned", "cached features of mixed sizes come and go for 300 steps",
        "Another allocator, or buffers of one size.", says="alloc|fragment", never=_BATCH,
    ),
    _second(
        "neighbour", "progressive", "another process takes 150 MiB before the last resolution",
        "Move one of the two.", says="GPU|process", never=_BATCH, neighbour=("150:3",),
    ),
    _second(
        "neighbour", "late_start", "another process takes 25 MiB a second while texts are read",
        "Move one of the two.", says="GPU|process", never=_BATCH, neighbour=tuple(f"25:{1 + each}" for each in range(7)),
        pace="default",
    ),
    _second(
        "host_input", "parallel_decoding", "64 decoded pictures of 6 MiB wait for the training",
        "Fewer parallel calls, thumbnails in the same call.", says=r"parallel|prefetch|buffer|pipeline|input", never="model",
    ),
    _second(
        "host_input", "two_buffers", "the shuffle buffer of the validation next to that of the training",
        "No shuffling for the validation, smaller buffers.", says=r"shuffle|buffer|pipeline|input", never="model",
    ),
)  # fmt: skip

# Written on 2026-11-25, after the rules were changed for the third and fourth set, by a person who had read neither them nor
# what was written about them: programs as most users write them. Labels and next steps are of before the first play. What is
# `too_big` has one example without its cause.
_PARTS = _BATCH + r"|parts|pieces|fewer|chunk"
THIRD = (
    _third(
        "batch_too_large", "photos", "residual blocks keep the activations of 384 photos in the first step, where 8 fit",
        "A smaller batch.", says=_BATCH,
    ),
    _third(
        "batch_too_large", "next_words", "logits of 64 texts, 2 MiB each and several times, where 4 fit",
        "A smaller batch.", says=_BATCH,
    ),
    _third(
        "batch_too_large", "faces", "an autoencoder keeps the activations of 256 pictures, where 8 fit",
        "A smaller batch.", says=_BATCH,
    ),
    _third(
        "batch_too_large", "adversaries", "two networks keep the activations of 320 pictures each, where 8 fit",
        "A smaller batch.", says=_BATCH,
    ),
    _third(
        "too_big", "wide_head", "a dense layer of 256 MiB behind features that were not pooled",
        "Pool before the dense layer, or make it smaller: its weights do not fit.",
        says=_MODEL + "|tensor|weights", never=_BATCH,
    ),
    _third(
        "too_big", "encoder", "72 MiB of weights four times, with gradients and AdamW's slots",
        "A smaller model, an optimizer with less state, lower precision.", says=_MODEL, never=_BATCH,
    ),
    _third(
        "too_big", "radiographs", "one picture of 2048 x 2048 needs 256 MiB a layer, and the batch is one",
        "Smaller pictures or tiles, fewer filters.",
        says=r"size|shape|crop|resize|resolution|tile|example|" + _MODEL, never=_LESS_BATCH,
    ),
    _third(
        "too_big", "vgg", "VGG16 has a kernel of 392 MiB",
        "A smaller model.", says=_MODEL + "|tensor|weights", never=_BATCH,
    ),
    _third(
        "too_big", "wide_lstm", "85 MiB of weights three times, with gradients and momentum",
        "Fewer units, an optimizer without state, lower precision.", says=_MODEL, never=_BATCH,
    ),
    _third(
        "leak", "attention_maps", "a callback keeps 8 MiB on the device after each epoch",
        "Keep them on the host, or fewer.", says=r"keep|kept|list|grow|host", never=_LESS_BATCH,
    ),
    _third(
        "leak", "exact_auc", "scores and labels of all steps are joined on the device",
        "Add figures up step by step, or keep scores on the host.", says=r"keep|kept|list|grow|host", never=_LESS_BATCH,
    ),
    _third(
        "leak", "never_cut", "one tape holds the activations of all steps",
        "An update, and a new tape, every few steps.", says=r"keep|kept|list|grow|tape", never=_LESS_BATCH,
    ),
    _third(
        "phase_peak", "views", "the test has 64 views of each picture in one batch",
        "Fewer views at a time.", says=_PARTS,
    ),
    _third(
        "phase_peak", "whole_documents", "validation has documents of 24 times the training's length",
        "Cut the validation's documents too, or validate in smaller batches.", says=_PARTS + r"|length|sequence|shape",
    ),
    _third(
        "phase_peak", "full_graph", "validation makes a dense matrix of the whole graph, 309 MiB",
        "Validate on parts of the graph, or with a sparse matrix.", says=_PARTS + r"|shape|sparse",
    ),
    _third(
        "neighbour", "reviews", "another process has 185 MiB before, and what is trained needs 88",
        "Move one of the two, or end the other.", says="GPU|process", never=_BATCH, neighbour=("185",), early=True,
    ),
    _third(
        "neighbour", "sentences", "another process takes 150 MiB before the longer examples",
        "Move one of the two, or end the other.", says="GPU|process", never=_BATCH, neighbour=("150:4",), pace="default",
    ),
    _third(
        "host_input", "batched_first", "tf.data makes batches of 432 MiB before it shrinks pictures",
        "Shrink each picture before the batch is made.", says=r"batch|buffer|pipeline|input|map", never="model",
    ),
    _third(
        "host_input", "raw_label", "NumPy, in tf.data's map, is asked for 72 TB",
        "Check the labels, or keep them as numbers (sparse loss).", says=r"shape|dtype|pipeline|input|label", never="model",
    ),
    _third(
        "fragmentation", "sessions", "three of five visits' features of mixed sizes are dropped",
        "Another allocator, or buffers of one size.", says="alloc|fragment", never=_BATCH,
    ),
)  # fmt: skip

SETS = {
    "ooms": OOMS,
    "leaks": LEAKS,
    "healthy": HEALTHY,
    "more": MORE,
    "paced": PACED,
    "long": LONG,
    "unseen": UNSEEN,
    "second": SECOND,
    "third": THIRD,
}
SITUATIONS = {each.name: each for each in sum(SETS.values(), ())}
