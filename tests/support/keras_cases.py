"""Real training for the tests of the callback: `python keras_cases.py FOLDER CASE ...` prints the results.

A process of its own, since the allocator is chosen before TensorFlow is imported, and since the client reports a
process. Each case trains against a daemon's socket of its own and returns its result in JSON types.
"""

from __future__ import annotations

import sys

import keras_case_setup  # first: it sets the allocator
import keras_error_cases
import keras_program_cases
import keras_step_cases
from training_cases import find_cases, run_and_print

if __name__ == "__main__":
    modules = keras_step_cases, keras_error_cases, keras_program_cases
    cases = {name: case for module in modules for name, case in find_cases(vars(module)).items()}
    run_and_print({name: cases[name] for name in sys.argv[2:] if name in cases}, keras_case_setup.Daemon)
