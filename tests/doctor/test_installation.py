"""Installation of a framework: once, whole, and not hidden by another file."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from fake_environment import CPU_BUILD, FakeEnvironment, real_python, run_rows

from gpuwarden.doctor.frameworks.build_checks import BUILD_CHECKS
from gpuwarden.doctor.frameworks.installation_checks import ENVIRONMENT_CHECKS
from gpuwarden.doctor.model import CheckResult, Context

ROWS = (*ENVIRONMENT_CHECKS, *BUILD_CHECKS)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEnvironment:
    """Return an environment without packages; the working folder is empty."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return FakeEnvironment(tmp_path / "env")


def check(environment: FakeEnvironment, tmp_path: Path, **environ: str) -> dict[str, CheckResult]:
    """Run the checks of the environment and of its frameworks."""
    return run_rows(ROWS, environment.context(tmp_path, environ))


def test_the_interpreter_is_not_resolved(environment: FakeEnvironment, tmp_path: Path) -> None:
    """The link of a virtual environment leads to an interpreter that has other packages."""
    environment.add("absl-py", "2.0")
    found = check(environment, tmp_path)["python.environment"]
    assert found.status == "pass"
    assert str(environment.folder) in found.found
    assert "1 packages" in found.found


def test_without_a_framework_each_is_skipped(environment: FakeEnvironment, tmp_path: Path) -> None:
    """Checks of a framework that is missing are skipped, and name the environment that lacks it."""
    results = check(environment, tmp_path)
    assert [results[f"{each}.installed"].status for each in ("tensorflow", "torch", "jax")] == ["skip"] * 3
    assert results["tensorflow.installed"].found.startswith("TensorFlow is not installed in ")
    assert "tensorflow.build" not in results


def test_an_interpreter_that_does_not_run_is_a_failure(tmp_path: Path) -> None:
    """The frameworks then have no results."""
    results = run_rows(ROWS, Context(tmp_path / "missing/python", {}, tmp_path))
    assert {name: each.status for name, each in results.items()} == {"python.environment": "fail"}
    assert "No such file" in results["python.environment"].found


def test_an_interpreter_that_fails_says_why(tmp_path: Path) -> None:
    """The last line of its error is shown."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'libpython3.8.so.1.0: cannot open shared object file' >&2\nexit 127\n")
    python.chmod(0o755)
    found = run_rows(ENVIRONMENT_CHECKS, Context(python, dict(os.environ), tmp_path))["python.environment"]
    assert found.status == "fail"
    assert "libpython3.8.so.1.0" in found.found


def test_an_interpreter_that_hangs_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of all frameworks share its failure."""
    monkeypatch.setattr("gpuwarden.doctor.frameworks.environment.PATIENCE_SECONDS", 0.5)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho started >> {tmp_path}/starts\nexec sleep 60\n")
    python.chmod(0o755)
    results = run_rows(ROWS, Context(python, dict(os.environ), tmp_path))
    assert {name: each.status for name, each in results.items()} == {"python.environment": "fail"}
    assert (tmp_path / "starts").read_text() == "started\n"


def test_a_program_that_is_no_python_is_a_failure(tmp_path: Path) -> None:
    """It ends well, and prints something else or nothing."""
    for printed in ("usage: tool [FILE]", "", "{}", "[1]"):
        python = tmp_path / f"python{len(printed)}"
        python.write_text(f"#!/bin/sh\necho '{printed}'\n")
        python.chmod(0o755)
        found = run_rows(ENVIRONMENT_CHECKS, Context(python, dict(os.environ), tmp_path))["python.environment"]
        assert (found.status, "is no Python" in found.found) == ("fail", True)


def test_metadata_in_another_encoding_costs_only_its_package(environment: FakeEnvironment, tmp_path: Path) -> None:
    """Old packages have names of people in Latin-1."""
    environment.add("torch", "2.9.0")
    environment.write("old-1.dist-info/METADATA").write_bytes(b"Name: old\nVersion: 1\nAuthor: Andr\xe9\n")
    assert check(environment, tmp_path)["python.environment"].found.endswith("with 1 packages.")


def test_a_deleted_working_folder_is_no_obstacle(
    environment: FakeEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hides no module."""
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    results = check(environment, tmp_path)
    assert {results["python.environment"].status, results["python.shadows"].status} == {"pass"}


def test_text_printed_at_the_start_of_the_interpreter_is_no_obstacle(
    environment: FakeEnvironment, tmp_path: Path
) -> None:
    """A sitecustomize or a .pth file may print."""
    environment.write("sitecustomize.py", "import sys; sys.stdout.write('hello')")
    assert check(environment, tmp_path)["python.environment"].status == "pass"


def test_two_distributions_in_one_folder_are_a_failure(environment: FakeEnvironment, tmp_path: Path) -> None:
    """Pip lists both, and the one installed last is imported."""
    environment.add_tensorflow(CPU_BUILD)
    environment.add_wheel("tensorflow-2.20.0")
    environment.add("tensorflow_cpu", "2.20.0")
    found = check(environment, tmp_path)["tensorflow.installed"]
    assert found.status == "fail"
    assert "tensorflow 2.20.0, tensorflow_cpu 2.20.0" in found.found
    assert "uninstall -y tensorflow tensorflow_cpu" in found.fix
    assert f"rm -rf {environment.site / 'tensorflow'}" in found.fix


def test_a_distribution_that_another_requires_is_not_a_second_one(environment: FakeEnvironment, tmp_path: Path) -> None:
    """TensorFlow on ARM consists of two distributions."""
    environment.add_tensorflow()
    text = "Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.20.0\nRequires-Dist: tensorflow-cpu-aws==2.20.0\n"
    environment.add("tensorflow", "2.20.0", text)
    environment.add("tensorflow_cpu_aws", "2.20.0")
    assert check(environment, tmp_path)["tensorflow.installed"].status == "pass"


def test_a_folder_left_by_an_uninstallation_is_a_failure(environment: FakeEnvironment, tmp_path: Path) -> None:
    """`pip uninstall tensorflow-cpu` next to tensorflow leaves the metadata of one and headers."""
    environment.add_wheel("tensorflow-2.20.0")
    environment.write("tensorflow/include/version.h")
    imported = subprocess.run([str(environment.python), "-c", "import tensorflow"], check=False)
    assert imported.returncode == 0  # this is why it is hard to notice
    results = check(environment, tmp_path)
    assert results["tensorflow.installed"].status == "fail"
    assert "no __init__.py" in results["tensorflow.installed"].found
    assert "tensorflow.build" not in results


def test_an_editable_installation_is_not_taken_for_a_leftover(environment: FakeEnvironment, tmp_path: Path) -> None:
    """Its import hook is not run."""
    environment.add("torch", "2.9.1")
    environment.write("torch-2.9.1.dist-info/direct_url.json", '{"dir_info": {"editable": true}, "url": "file:///src"}')
    assert check(environment, tmp_path)["torch.installed"].status == "skip"


@pytest.mark.parametrize("name", ["tensorflow.py", "tensorflow/__init__.py"])
def test_a_file_of_the_working_folder_that_hides_tensorflow_is_a_failure(
    environment: FakeEnvironment, tmp_path: Path, name: str
) -> None:
    """It is what a program in that folder imports."""
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0")
    file = Path(name)
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    found = check(environment, tmp_path)["tensorflow.installed"]
    assert found.status == "fail"
    assert str(file.absolute()) in found.found
    shown = [str(environment.python), "-c", "import tensorflow; print(tensorflow.__file__)"]
    assert Path(subprocess.run(shown, capture_output=True, text=True, check=True).stdout.strip()) == file.absolute()


def test_an_empty_folder_of_that_name_hides_nothing(environment: FakeEnvironment, tmp_path: Path) -> None:
    """A package elsewhere on the path comes before it."""
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0")
    Path("tensorflow").mkdir()
    assert check(environment, tmp_path)["tensorflow.installed"].status == "pass"


@pytest.mark.parametrize("name", ["random.py", "keras.py", "termcolor.py"])
def test_a_file_with_the_name_of_a_needed_module_is_a_failure(
    environment: FakeEnvironment, tmp_path: Path, name: str
) -> None:
    """A module of the standard library, Keras, or a package that a framework requires."""
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0")
    environment.write("keras/__init__.py")
    environment.write("termcolor.py")
    Path(name).write_text("")
    Path("train.py").write_text("")
    found = check(environment, tmp_path)["python.shadows"]
    assert found.status == "fail"
    assert found.found.endswith(f": {Path(name).absolute()}.")


def test_a_broken_file_with_the_name_of_a_needed_module_is_a_failure_too(
    environment: FakeEnvironment, tmp_path: Path
) -> None:
    """The doctor's own program in the environment does not import it."""
    Path("json.py").write_text("raise SystemExit(1)")
    found = check(environment, tmp_path)
    assert (found["python.environment"].status, found["python.shadows"].status) == ("pass", "fail")


def test_a_wheel_for_another_python_is_a_failure(environment: FakeEnvironment, tmp_path: Path) -> None:
    """As in a folder of PYTHONPATH, or where the interpreter of an environment was replaced; of any needed package."""
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0", versions={"numpy": "2.1.0"})
    older, minor, newer = (sys.version_info.minor + each for each in (-1, 0, 1))
    for tag, is_foreign in (
        (f"cp3{newer}-cp3{newer}-manylinux_2_28_x86_64", True),
        (f"cp3{older}-cp3{older}-manylinux_2_17_x86_64", True),
        (f"cp3{newer}-abi3-manylinux_2_28_x86_64", True),
        (f"cp3{older}-abi3-manylinux_2_17_x86_64", False),
        (f"cp3{minor}-cp3{minor}t-manylinux_2_28_x86_64", False),
        ("py2.py3-none-any", False),
        ("py3-none-manylinux_2_28_x86_64", False),
    ):
        environment.write("numpy-2.1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        found = check(environment, tmp_path)["python.wheels"]
        assert found.status == ("fail" if is_foreign else "pass"), tag
        if is_foreign:
            assert f"numpy 2.1.0 in {environment.site} for {tag.partition('-')[0]}" in found.found
            assert found.fix == f"{environment.python} -m pip install --force-reinstall numpy==2.1.0"


def test_a_python_that_cannot_list_its_modules_has_the_usual_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python before 3.10."""
    python = tmp_path / "python"
    answer = {"version": "3.6.15", "prefix": "/usr", "path": ["", str(Path(os.__file__).parent)], "modules": []}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    python.chmod(0o755)
    (tmp_path / "random.py").touch()
    monkeypatch.chdir(tmp_path)
    found = run_rows(ENVIRONMENT_CHECKS, Context(python, dict(os.environ), tmp_path))["python.shadows"]
    assert found.found.endswith(f": {tmp_path / 'random.py'}.")


def test_the_working_folder_hides_nothing_where_python_does_not_search_it(
    environment: FakeEnvironment, tmp_path: Path
) -> None:
    """PYTHONSAFEPATH, of Python 3.11."""
    Path("random.py").write_text("")
    is_known = sys.version_info >= (3, 11)
    found = check(environment, tmp_path, PYTHONSAFEPATH="1")["python.shadows"]
    assert found.status == ("pass" if is_known else "fail")


def test_a_file_in_place_of_a_framework_that_is_not_installed(environment: FakeEnvironment, tmp_path: Path) -> None:
    """In a folder of PYTHONPATH."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/torch.py").write_text("")
    found = check(environment, tmp_path, PYTHONPATH=str(tmp_path / "lib"))["torch.installed"]
    assert found.status == "fail"
    assert str(tmp_path / "lib/torch.py") in found.found


def test_two_copies_on_the_path_are_a_warning(environment: FakeEnvironment, tmp_path: Path) -> None:
    """The first one is used, here that of PYTHONPATH."""
    environment.add_tensorflow()
    environment.add_wheel("tensorflow-2.20.0")
    other = FakeEnvironment(tmp_path / "other")
    other.add_tensorflow(CPU_BUILD)
    other.add_wheel("tensorflow-2.17.1")
    results = check(environment, tmp_path, PYTHONPATH=str(other.site))
    assert results["tensorflow.installed"].status == "warn"
    assert results["tensorflow.installed"].found.startswith(f"tensorflow 2.17.1 in {other.site}")
    assert "CPU only" in results["tensorflow.build"].found


def test_this_environment_has_a_tensorflow_for_the_cpu(tmp_path: Path) -> None:
    """The real one: whole, its requirements met, and without CUDA."""
    results = run_rows(ROWS, Context(real_python(), dict(os.environ), tmp_path))
    assert results["tensorflow.installed"].status == "pass"
    assert results["tensorflow.build"].status == "warn"  # the machine of this test has no GPU
    assert "build for the CPU only" in results["tensorflow.build"].found
    assert results["tensorflow.packages"].status == "pass"


def test_the_doctor_imports_no_framework_and_is_quick(tmp_path: Path) -> None:
    """Files with their names note an import; the limit of three seconds is for all checks."""
    for name in ("tensorflow", "torch", "jax", "jaxlib", "keras", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "gpuwarden", "doctor", "--json", "--python", sys.executable]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    names = {each["name"] for each in json.loads(ended.stdout)["checks"]}
    assert {"python.environment", "tensorflow.installed", "torch.installed", "jax.installed"} <= names
    assert not (tmp_path / "imported").exists()
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime  # the clock counts others' work too
    assert seconds < 3
