"""Real training for the tests of the callback: `python keras_cases.py FOLDER SUBJECT|CASE ...` prints the results.

A process of its own, since the allocator is chosen before TensorFlow is imported, and since the client reports a
process. Each case trains against a daemon's socket of its own and returns its result in JSON types.
"""

from __future__ import annotations

import sys

import keras_case_setup  # first: it sets the allocator
import keras_error_cases
import keras_program_cases
import keras_step_cases
from training_cases import cases_in, serve

if __name__ == "__main__":
    fatal = "compiled_out_of_memory"  # TensorFlow crashes later in a process where XLA had none
    modules = {"steps": keras_step_cases, "errors": keras_error_cases, "program": keras_program_cases}
    subjects = {name: cases_in(vars(module)) for name, module in modules.items()}
    cases = {name: case for subject in subjects.values() for name, case in subject.items()}
    names = [name for each in sys.argv[2:] for name in subjects.get(each, [each])]
    chosen = {name: cases[name] for name in names if name != fatal or name in sys.argv}
    serve(chosen, keras_case_setup.Daemon)
