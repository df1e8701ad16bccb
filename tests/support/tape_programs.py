"""TensorFlow programs with a GradientTape that know nothing of gpuwarden, by name."""

TAPE = """
import tensorflow as tf

def make_step(model, optimizer):
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X) - Y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss
    return step

step = make_step(model, model.optimizer)
traced = tf.function(step)

@tf.function
def several(count):
    for _ in tf.range(count):
        step()
"""

TAPES = {
    "eager": "for _ in range(5): step()",
    "traced": "for _ in range(7): traced()",
    "loop within": "for _ in range(3): several(10)",
    "one call": "several(10)",
    "loops of several lengths": "for count in (10, 20, 30, 40): several(tf.constant(count))",
    "train_on_batch": "for _ in range(6): model.train_on_batch(X, Y)",
    "fit, then eager": "fit(model)\nfor _ in range(5): step()",
    "restored": "model.optimizer.build(model.trainable_variables)\nmodel.optimizer.iterations.assign(500)\n"
    "for _ in range(7): traced()\nmodel.optimizer.iterations.assign_sub(500)",
    "eager functions": "tf.config.run_functions_eagerly(True)\nfor _ in range(4): traced()",
}
