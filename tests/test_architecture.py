"""Rules of STYLE.md that a program can check."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from common.config import build_parser, parse_invocation

ROOT = Path(__file__).parent.parent
STAGES = sorted(path.stem for path in ROOT.glob("0[1-5]_*.py"))
# Bottom first; a module may import only from lines above its own.
LAYERS = [
    {"errors"},
    {"files"},
    {"config", "manifest", "progress"},
    {"samples", "hidden_states", "vocab_mapping", "checkpoints", "embedded"},
    {"verifier", "corpus", "cleaning", "acceptance", "ttt_rows", "training_log", "head_loss", "engine", "endpoint"},
    {"chat", "connector", "draft", "generation", "serve_check", "export", "target_check"},
    {"packing", "simulation", "draft_import", "model_card"},
    {"trainer"},
    {"status", "preflight"},
    {"report"},
    {"stage"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "common":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("common."):
            found.add(node.module.split(".")[1])
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "common").glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_a_module_imports_nothing_from_above_it(path):
    assert path.stem in LEVEL, f"say where {path.stem} stands in the stack"
    above = {name for name in imports_of(path) if LEVEL[name] > LEVEL[path.stem]}
    assert not above


def test_stages_never_import_each_other():
    assert len(STAGES) == 5
    for name in STAGES:
        assert not re.search(r"import_module|from 0\d_|import 0\d_", (ROOT / f"{name}.py").read_text())


def functions():
    for path in [*ROOT.glob("0*.py"), *(ROOT / "common").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.name}:{node.name}", node.end_lineno - node.lineno + 1


def test_no_function_is_longer_than_a_page():
    assert not {name: lines for name, lines in functions() if lines > 60}


def commands_in(text: str):
    """Commands in the fenced blocks of a Markdown file, continuation lines joined."""
    for block in re.findall(r"```bash\n(.*?)```", text, flags=re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#"):
                yield line.split(" #")[0].strip()


WRITTEN = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("command", sorted({c for path in WRITTEN for c in commands_in(path.read_text())}))
def test_every_command_of_readme_and_docs_is_one_that_exists(command):
    words = shlex.split(command)
    if words[0] == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
        assert {word for word in words[1:] if "=" not in word} <= targets
    elif words[0] == "python" and words[1].endswith(".py"):
        check_stage_command(words[1:])
    else:
        assert words[:2] == ["python", "-m"] or words[0] in ("torchrun", "cp", "tmux"), command
    if words[0] == "torchrun":
        check_stage_command(words[[w.endswith(".py") for w in words].index(True) :])


def check_stage_command(words: list[str]) -> None:
    import importlib

    stage = importlib.import_module(words[0].removesuffix(".py")).STAGE
    parser = build_parser(stage.script, "")
    if stage.add_flags:
        stage.add_flags(parser)
    config = ROOT / "configs" / Path(words[words.index("--config") + 1]).name
    words = [
        str(config if config.exists() else ROOT / "configs/smollm2_135m.yaml") if w.endswith(".yaml") else w
        for w in words
    ]
    parse_invocation(parser, words[1:])
