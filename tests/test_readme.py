"""README.md is true: its commands parse or run, its tables are the result files', its tree exists.

Commands that prune, evaluate or convert are run as they stand, in a folder where `MODEL` is a tiny
random model and `LEGACY` an old checkpoint. What needs a network, a GPU or minutes is parsed by the
program that it starts.
"""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from pruning_helpers import save_tiny

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN = ("prune.py", "evaluate.py", "convert.py")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


COMMANDS = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
IDS = [shlex.join(command) for command in COMMANDS]


def script(path):
    """A script as a module, its logic importable."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse_script(path, arguments):
    """Let the script's own parser judge the arguments; nothing runs."""
    module = script(path)
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer()
        app.command()(module.main)
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, arguments = command.commands[arguments[0]], arguments[1:]
    command.make_context(path.name, list(arguments))


def parse_vllm(arguments):
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert arguments[0] == "serve"
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--model", *arguments[1:]])
    assert parsed.quantization in ("spense", None)


def parse_pip(arguments):
    assert arguments[0] == "install"
    for target in arguments[1:]:
        name, extras = re.fullmatch(r"([\w.-]+)(?:\[([\w,]+)\])?", target).groups()
        assert name == "."
        for extra in filter(None, (extras or "").split(",")):
            assert extra in PYPROJECT["project"]["optional-dependencies"]


def parse_shell(path):
    assert path.stat().st_mode & 0o100, f"{path} is not executable"
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_command_parses(command):
    words = [word for word in command if not re.fullmatch(r"[A-Z_]+=.*", word)]
    program, arguments = words[0], words[1:]
    if program == "python":
        parse_script(ROOT / arguments[0], arguments[1:])
    elif program == "vllm":
        parse_vllm(arguments)
    elif program == "pip":
        parse_pip(arguments)
    elif program.startswith("scripts/"):
        assert not arguments
        parse_shell(ROOT / program)
    else:
        pytest.fail(f"no check for {program}")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """The README's folders MODEL and OUT, made by its own commands."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    save_tiny(folder / "MODEL", max_position_embeddings=2048)
    shutil.copytree(ROOT / "tests" / "fixtures" / "legacy" / "fp8-bitmask", folder / "LEGACY")
    return folder


def test_commands_run(workplace):
    commands = [c for c in COMMANDS if c[0] == "python" and Path(c[1]).name in RUN]
    assert {Path(c[1]).name for c in commands} == set(RUN)
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command[1:]], cwd=workplace, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for name in ("OUT", "TWIN", "CONVERTED"):
        assert (workplace / name / "config.json").is_file()


def test_python_runs(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    assert blocks("python")
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    assert "25% dense" in capsys.readouterr().out


def test_tree_is_of_this_project():
    """Every path in the tree exists, and every script is in it."""
    (tree,) = blocks("text")
    folder, paths = "", set()
    for line in tree.splitlines():
        name, _, words = line.strip().partition(" ")
        if not line.startswith(" "):
            folder = name
        paths.add(name if name == folder else folder + name)
        assert words.strip() or name == folder, f"{name} has no words"
    assert not [path for path in paths if not (ROOT / path).exists()]
    scripts = {f"scripts/{p.name}" for p in (ROOT / "scripts").iterdir() if p.is_file()}
    assert scripts <= paths


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            heads = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
            assert target[1:] in {
                re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads
            }
        elif not target.startswith("https://"):
            assert (ROOT / target).exists(), target


def test_options_in_prose_exist():
    """Every `--option` in the text belongs to some script or to vLLM."""
    known = set()
    for path in (ROOT / "scripts").glob("*.py"):
        known |= set(re.findall(r"--[a-z][a-z-]+", path.read_text(encoding="utf-8")))
        for name in re.findall(r"^    (\w+): Annotated", path.read_text(encoding="utf-8"), re.M):
            known.add("--" + name.replace("_", "-"))
    known |= {"--quantization"}
    assert not set(re.findall(r"--[a-z][a-z-]+", README)) - known


@pytest.fixture(scope="module")
def tables():
    return script(ROOT / "scripts" / "readme_tables.py")


def test_numbers_are_those_of_the_result_files(tables):
    assert tables.render(README, ROOT / "benchmarks") == README
    marked = re.findall(r"<!-- table: (\w+) -->", README)
    assert len(set(marked)) == len(marked) > 0


def test_unknown_table(tables):
    with pytest.raises(ValueError, match="asks for table 'speed'"):
        tables.render("<!-- table: speed -->\n<!-- end -->", ROOT / "benchmarks")


def result(folder, name, rows, **head):
    head = {"device": "TestCard", "date": "2026-01-01", "command": "measure"} | head
    (folder / name).write_text(json.dumps(head | {"rows": rows}))


def gemm_row(layer, m, us, dense_us, share=0.25):
    return {
        "model": "big", "layer": layer, "M": m, "dtype": "fp8", "kind": "hybrid",
        "dense_share": share, "us": us, "dense_us": dense_us, "ratio": dense_us / us,
    }  # fmt: skip


def test_gemm_table_adds_up_time_and_shows_the_worst(tables, tmp_path):
    rows = [gemm_row("gate_up", 16, 10.0, 30.0), gemm_row("down", 16, 30.0, 20.0)]
    result(tmp_path, "gemm-TestCard.json", rows, vllm="0.26.0")
    table = tables.table("gemm", tmp_path)
    assert "| 16 | 1.25 × | 0.67 (down, 25% dense) |" in table
    assert "TestCard, vllm 0.26.0, 2026-01-01; `measure`" in table


def test_quality_table(tables, tmp_path):
    row = {
        "model": "small", "method": "wanda", "dense_share": 0.0, "dtype": "fp8", "ppl": 20.123,
        "kl": 0.4567, "top1": 0.625, "dense_ppl": 17.0, "bytes": 3 << 20,
        "calibration": "a.txt", "text": "b.txt",
    }  # fmt: skip
    result(tmp_path, "quality.json", [row], device=None)
    table = tables.table("quality", tmp_path)
    assert "| wanda | 0% | fp8 | 20.12 | 0.457 | 62.5% | 3 |" in table
    assert "the dense model has PPL 17.00" in table


def test_table_without_results(tables, tmp_path):
    assert tables.table("serve", tmp_path) == "Not measured yet.\n"


def test_serve_and_equality_tables(tables, tmp_path):
    serve = {
        "model": "big", "dense_share": 0.25, "metric": "tpot_ms", "batch": 1, "prompt_tokens": 512,
        "value": 8.0, "dense_value": 12.0, "ratio": 1.5,
    }  # fmt: skip
    result(tmp_path, "serve-TestCard.json", [serve])
    assert "| big | 25% | tpot_ms | 1 | 512 | 8 | 12 | 1.50 |" in tables.table("serve", tmp_path)
    near = {"checkpoint": "c", "kl": 1e-4, "top1": 0.99, "kernels_kl": 1e-4, "ratio": 1.0}
    worst = {"checkpoint": "c", "kl": 1e-5, "top1": 1.0, "kernels_kl": 5e-6, "ratio": 2.0}
    rows = [near, worst, {"checkpoint": "d", "kl": 0.0, "top1": 1.0}]
    result(tmp_path, "equality-TestCard.json", rows)
    table = tables.table("equality", tmp_path)
    assert "| c | 1.00e-05 | 5.00e-06 | 2.00 | 100.0% |" in table
    assert "| d | 0.00e+00 | – | – | 100.0% |" in table
