"""Trainings whose memory another process takes: without their cause it is not started, and they pass."""

from __future__ import annotations

from training_run import (
    compile_model,
    fit,
    layers,
    main,
    make_callback,
    make_dense_model,
    make_repeated_batches,
    make_steady_stream,
    reserve,
)

from labels import BATCH, training


@training("co_tenant", co_tenant=("170:4",), pace="default")
def co_tenant_sudden() -> None:
    """Another process allocates 170 MiB before a larger model is built."""
    fit(make_dense_model(1024), make_steady_stream(256, 250, pause=0.012), epochs=2)
    fit(make_dense_model(4096, optimizer="adam"), make_steady_stream(2048, 100))


@training("co_tenant", co_tenant=("170",), co_tenant_first=True)
def co_tenant_preallocating() -> None:
    """Another process leaves little to preallocate."""
    reserve()
    fit(make_dense_model(4096, optimizer="adam"), make_steady_stream(2048, 100))


@training("co_tenant", co_tenant=tuple(f"12:{2 + n}" for n in range(16)), advises="GPU|process", never=BATCH)
def co_tenant_grows() -> None:
    """Another process grows by 12 MiB a second, and each prediction has more examples."""
    model = make_dense_model(3072, optimizer="adam")
    for number in range(1, 9):
        fit(model, make_steady_stream(512, 60, pause=0.015))
        model.predict(make_steady_stream(1536 * number, 1).map(lambda x, _: x), verbose=0, callbacks=[make_callback()])


@training("co_tenant", co_tenant=("185",), co_tenant_first=True, advises="GPU|process", never=BATCH)
def reviews() -> None:
    """Another process has 185 MiB before, and the training needs 88."""
    stack = [layers.Embedding(60_000, 128), layers.Conv1D(32, 5), layers.GlobalMaxPooling1D(), layers.Dense(1)]
    fit(compile_model(layers.Input((40,)), *stack), make_repeated_batches(10, (32, 40), (32, 1)))


if __name__ == "__main__":
    main()
