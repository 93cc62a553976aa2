"""`report.html`: what a run is made of and what came out, in one file that needs no network.

    python -m common.report RUN_DIR [--compare OTHER_RUN_DIR]

Reads disk only, works for a half-finished run, and is written by itself after each stage. Every number in a plot also
stands in a table or shows on hover. Knows the artifacts, and nothing of how they are made.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from common import checkpoints, manifest, status
from common import hidden_states as states
from common.errors import PipelineError
from common.files import format_bytes, format_count, format_duration, write_text
from common.manifest import Manifest
from common.samples import Sample, open_samples

REPORT_NAME = "report.html"
TEMPLATE_NAME = "report.html.jinja"
PREVIEWED_SAMPLES = 4
PREVIEWED_TOKENS = 400  # of one sample; a page is for looking, the file has the rest
MEASURED_SAMPLES = 16  # whose states' norms are shown
SMOOTHED_STEPS = 25
COLOURS = ("#3b76d6", "#d9762b", "#2f9e6b", "#a05bd0")


@dataclass(frozen=True)
class Plot:
    """One figure; its id is its place on the page."""

    plot_id: str
    title: str
    caption: str
    figure: go.Figure


@dataclass(frozen=True)
class TableOf:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclass(frozen=True)
class Piece:
    text: str
    is_supervised: bool


@dataclass(frozen=True)
class Preview:
    title: str
    pieces: Sequence[Piece]


@dataclass
class Section:
    title: str
    text: str = ""
    plots: list[Plot] = field(default_factory=list)
    tables: list[TableOf] = field(default_factory=list)
    samples: list[Preview] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """A run as far as it has come: its manifests by artifact, its training log, what was served."""

    path: Path
    manifests: Mapping[str, Manifest]
    log: Sequence[Mapping[str, Any]]
    served: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.path.name


def open_run(path: Path) -> Run:
    complete = [name for name in status.STAGES.values() if manifest.is_complete(path / name)]
    served = path / status.STAGES["05_convert_checkpoint"] / status.REPORT_NAME
    return Run(
        path,
        {name: manifest.read_manifest(path / name) for name in complete},
        list(_log_lines(path / checkpoints.DIR_NAME / checkpoints.LOG_FILE)),
        json.loads(served.read_text(encoding="utf-8")) if served.is_file() else {},
    )


def _log_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of the training log; one that is being written is left out."""
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


# ---- sections --------------------------------------------------------------------------------------------------------


def stages_section(run: Run) -> Section:
    found = status.read_status(run.path)
    rows = [
        [s.script, s.state, format_duration(s.seconds) if s.seconds else "", format_bytes(s.bytes) if s.bytes else ""]
        for s in found.stages
    ]
    text = f"Next: {found.next_command}" if found.next_command else ""
    return Section("Stages", text, tables=[TableOf("", ["stage", "state", "time", "on disk"], rows)])


def samples_section(run: Run) -> Section | None:
    if "samples" not in run.manifests:
        return None
    samples, counts = open_samples(run.path), run.manifests["samples"].counts
    share = counts["supervised_tokens"] / counts["tokens"]
    section = Section("Samples", f"{share:.1%} of the tokens are supervised (marked in the samples below).")
    section.plots = [
        Plot("lengths", "Tokens in a sample", "All samples, and the supervised part of each.", _lengths(samples))
    ]
    kinds: dict[tuple[str, str], list[int]] = {}
    for source, split, tokens in zip(samples.sources, samples.splits, samples.num_tokens, strict=True):
        kinds.setdefault((source, split), []).append(int(tokens))
    rows = [[*key, format_count(len(tokens)), format_count(sum(tokens))] for key, tokens in sorted(kinds.items())]
    section.tables = [TableOf("By source", ["source", "split", "samples", "tokens"], rows)]
    dropped = counts.get("dropped_reasons") or {}
    reasons = [[reason, format_count(count)] for reason, count in sorted(dropped.items(), key=lambda item: -item[1])]
    section.tables.append(TableOf("Dropped rows", ["reason", "rows"], reasons or [["none", "0"]]))
    section.samples = [_preview(run, samples[i], i) for i in range(min(PREVIEWED_SAMPLES, len(samples)))]
    return section


def _lengths(samples: Any) -> go.Figure:
    figure = go.Figure()
    for values, name, colour in (
        (samples.num_tokens, "all tokens", COLOURS[0]),
        (samples.num_supervised, "supervised", COLOURS[2]),
    ):
        figure.add_histogram(x=values.tolist(), name=name, marker_color=colour, opacity=0.7, nbinsx=40)
    return figure.update_layout(barmode="overlay", xaxis_title="tokens", yaxis_title="samples")


def _preview(run: Run, sample: Sample, index: int) -> Preview:
    changes = np.flatnonzero(np.diff(sample.loss_mask[:PREVIEWED_TOKENS])) + 1
    decode = _decoder(run)
    parts = zip(
        np.split(sample.input_ids[:PREVIEWED_TOKENS], changes),
        np.split(sample.loss_mask[:PREVIEWED_TOKENS], changes),
        strict=True,
    )
    pieces = [Piece(decode(ids.tolist()), bool(mask[0])) for ids, mask in parts]
    title = f"Sample {index}: {sample.num_supervised} of {sample.num_tokens} tokens supervised, {sample.split}"
    return Preview(title, pieces)


def _decoder(run: Run) -> Any:
    """The verifier's own decoder; ids as numbers where its directory is not at hand, as on another machine."""
    from common.config import Config
    from common.verifier import load_tokenizer, open_verifier

    try:
        config = Config(**run.manifests["samples"].config)
        tokenizer = load_tokenizer(open_verifier(config.verifier))
    except PipelineError:
        return lambda ids: " ".join(map(str, ids)) + " "
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def vocabulary_section(runs: Sequence[Run]) -> Section | None:
    having = [run for run in runs if "vocab_mapping" in run.manifests]
    if not having:
        return None
    figure, rows = go.Figure(), []
    for run, colour in zip(having, COLOURS, strict=False):
        counts = run.manifests["vocab_mapping"].counts
        by_size = {int(size): shares for size, shares in (counts.get("coverage") or {}).items()}
        for split, dash in (("train", "dot"), ("val", "solid")):
            shares = [100 * by_size[size][split] for size in sorted(by_size)]
            sizes = [str(size) for size in sorted(by_size)]
            line = {"color": colour, "dash": dash}
            figure.add_scatter(x=sizes, y=shares, name=f"{run.name} {split}", line=line)
        for size in sorted(by_size):
            chosen = " (chosen)" if size == counts["draft_vocab_size"] else ""
            values = [f"{by_size[size][split]:.3%}" for split in ("train", "val")]
            rows.append([run.name, f"{size:,}{chosen}", *values])
    figure.update_layout(xaxis_title="draft vocabulary", yaxis_title="% of supervised tokens", xaxis_type="category")
    caption = "What lies outside the draft vocabulary can't be drafted, so this caps acceptance."
    plot = Plot("coverage", "Coverage", caption, figure)
    table = TableOf("", ["run", "draft vocabulary", "training", "validation"], rows)
    return Section("Draft vocabulary", plots=[plot], tables=[table])


def states_section(run: Run) -> Section | None:
    if "hidden_states" not in run.manifests:
        return None
    opened = states.open_hidden_states(run.path)
    names = [str(i) for i in opened.aux_layer_ids] + ["last"]
    norms: list[list[float]] = [[] for _ in names]
    for index in range(0, len(opened), max(1, len(opened) // MEASURED_SAMPLES)):
        found = opened.load(index)
        for slot, tensor in enumerate([*found.aux, found.last]):
            # The first token is an attention sink whose norm is a hundred times the others'.
            norms[slot] += tensor[1:].float().norm(dim=-1).tolist()
    figure = go.Figure()
    for name, values in zip(names, norms, strict=True):
        figure.add_box(y=values, name=name, marker_color=COLOURS[0], boxpoints=False)
    figure.update_layout(xaxis_title="aux layer id", xaxis_type="category", showlegend=False)
    figure.update_layout(yaxis_title="norm of a state", yaxis_type="log")
    rows = [
        [name, *(f"{q:.4g}" for q in np.quantile(v, (0.05, 0.5, 0.95)))] for name, v in zip(names, norms, strict=True)
    ]
    counts = run.manifests["hidden_states"].counts
    text = f"The canary agreed for {counts['canary_agreement']:.1%} of {counts['canaries']} samples: their last state "
    text += "says what the engine itself said next."
    caption = f"Every token but the first of {min(MEASURED_SAMPLES, len(opened))} samples."
    plot = Plot("norms", "Norms by layer", caption, figure)
    table = TableOf("", ["layer", "5%", "median", "95%"], rows)
    return Section("Hidden states", text, [plot], [table])


def training_section(runs: Sequence[Run]) -> Section | None:
    having = [run for run in runs if any("step" in line for line in run.log)]
    if not having:
        return None
    loss, accuracy, length = go.Figure(), go.Figure(), go.Figure()
    rows = []
    for number, run in enumerate(having):
        steps = [line for line in run.log if "step" in line]
        x = [line["step"] for line in steps]
        label = f"{run.name} " if len(having) > 1 else ""
        loss.add_scatter(x=x, y=_smoothed([s["loss"] for s in steps]), name=f"{label}loss", line_color=COLOURS[number])
        ttt = [key for key in steps[0] if key.startswith("full_acc_")]
        for key, colour in zip(ttt, COLOURS, strict=False):
            dash = "dot" if number else "solid"
            name, line = f"{label}step {key.removeprefix('full_acc_')}", {"color": colour, "dash": dash}
            accuracy.add_scatter(x=x, y=_smoothed([100 * s[key] for s in steps]), name=name, line=line)
        marks = _validations(run)
        length.add_scatter(
            x=[step for step, _ in marks],
            y=[v["acceptance_length"] for _, v in marks],
            name=f"{label}simulated",
            line_color=COLOURS[number],
            mode="lines+markers",
        )
        rows += [[run.name, format_count(step), f"{v['loss']:.4f}", *_accuracies(v)] for step, v in marks]
    for figure, name in ((loss, "loss"), (accuracy, "% right"), (length, "acceptance length")):
        figure.update_layout(xaxis_title="optimiser step", yaxis_title=name)
    caption = f"Mean of the last {SMOOTHED_STEPS} steps."
    plots = [
        Plot("loss", "Training loss", caption, loss),
        Plot("accuracy", "Accuracy by TTT step", caption + " All positions of the pack that carry loss.", accuracy),
        Plot("length", "Simulated acceptance length", "On the validation split, after each validation.", length),
    ]
    header = ["run", "step", "validation loss", "acceptance length", "first right", "second", "third"]
    return Section("Training", plots=plots, tables=[TableOf("Validations", header, rows)])


def _validations(run: Run) -> list[tuple[int, Mapping[str, Any]]]:
    """Each validation with the optimiser step after which it ran."""
    found, step = [], 0
    for line in run.log:
        step = line.get("step", step)
        if "validation" in line:
            found.append((step, line["validation"]))
    return found


def _accuracies(validation: Mapping[str, Any]) -> list[str]:
    shares = [f"{validation[key]:.3f}" for key in sorted(validation) if key.startswith("full_acc_")][:3]
    return [f"{validation['acceptance_length']:.3f}", *shares, *[""] * (3 - len(shares))]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Trailing mean, so that no step knows of later ones."""
    sums = np.cumsum([0.0, *values])
    starts = np.maximum(np.arange(1, len(sums)) - SMOOTHED_STEPS, 0)
    return ((sums[1:] - sums[starts]) / (np.arange(1, len(sums)) - starts)).round(5).tolist()


def serving_section(runs: Sequence[Run]) -> Section | None:
    entries = [(run, entry) for run in runs for entry in run.served.get("runs", [])]
    if not entries:
        return None
    figure, rows = go.Figure(), []
    for run, entry in entries:
        shares = entry["acceptance_by_position"]
        name = f"{run.name} {entry['prompt_set']}, {entry['num_draft_tokens']} tokens"
        figure.add_bar(x=[str(i + 1) for i in range(len(shares))], y=[100 * s for s in shares], name=name)
        simulated, rate = entry.get("simulated_acceptance_length"), entry["output_tokens_per_second"]
        rows.append(
            [
                run.name,
                f"{entry['prompt_set']} ({entry['num_prompts']})",
                str(entry["num_draft_tokens"]),
                f"{entry['acceptance_length']:.3f}",
                f"{simulated:.3f}" if simulated else "",
                ", ".join(f"{share:.3f}" for share in shares),
                f"{rate['with_draft']:.0f}",
                f"{rate['without']:.0f}",
            ]
        )
    figure.update_layout(xaxis_title="position in the draft", yaxis_title="% accepted", barmode="group")
    header = ["run", "prompts", "draft tokens", "acceptance length", "simulated", "by position", "tokens/s", "without"]
    lossless = [
        [run.name, dtype, f"{found['same']} of {found['prompts']}"]
        for run in runs
        for dtype, found in run.served.get("greedy", {}).items()
    ]
    plot = Plot("positions", "Accepted by position", "Share of drafts whose token here was accepted.", figure)
    tables = [TableOf("", header, rows), TableOf("Greedy output unchanged", ["run", "dtype", "prompts"], lossless)]
    text = (
        "Measured by vLLM. The acceptance length counts the verifier's own token, so 1 means that nothing was accepted."
    )
    return Section("Served", text, [plot], tables)


def lineage_section(runs: Sequence[Run]) -> Section:
    rows = [
        [run.name, name, made.digest[:12], ", ".join(f"{k} {v[:12]}" for k, v in made.inputs.items()), made.commit[:12]]
        for run in runs
        for name, made in run.manifests.items()
    ]
    tables = [TableOf("Lineage", ["run", "artifact", "digest", "made from", "commit"], rows)]
    for run in runs:
        if run.manifests:
            last = list(run.manifests.values())[-1]
            settings = [[f"{s}.{k}", str(v)] for s, keys in last.config.items() for k, v in keys.items()]
            tables.append(TableOf(f"Configuration of {run.name}", ["key", "value"], settings, folded=True))
            versions = [[name, version] for name, version in last.packages.items()]
            tables.append(TableOf(f"Versions of {run.name}", ["package", "version"], versions, folded=True))
    return Section("Configuration and lineage", tables=tables)


def facts(run: Run) -> list[dict[str, str]]:
    found = []
    for entry in run.served.get("runs", []):
        name = f"acceptance length, {entry['prompt_set'].removeprefix('embedded:')}"
        found.append({"name": name, "value": f"{entry['acceptance_length']:.3f}"})
    if "samples" in run.manifests:
        found.append({"name": "samples", "value": format_count(run.manifests["samples"].counts["samples"])})
        found.append({"name": "tokens", "value": format_count(run.manifests["samples"].counts["tokens"])})
    seconds = sum(made.seconds for made in run.manifests.values())
    return [*found, {"name": "all stages", "value": format_duration(seconds)}]


# ---- the page --------------------------------------------------------------------------------------------------------


def render(run_dir: Path, compare: Path | None = None) -> str:
    """The whole page. Raises: PipelineError when an artifact that says it is complete can't be read."""
    run = open_run(run_dir)
    runs = [run] + ([open_run(compare)] if compare else [])
    possible = [
        serving_section(runs),
        stages_section(run),
        samples_section(run),
        vocabulary_section(runs),
        states_section(run),
        training_section(runs),
        lineage_section(runs),
    ]
    sections = [section for section in possible if section]
    plots = {plot.plot_id: plot.figure.to_plotly_json() for section in sections for plot in section.plots}
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template(TEMPLATE_NAME).render(
        title=f"{run.name}: an EAGLE-3 draft" + (f", beside {runs[1].name}" if compare else ""),
        subtitle=f"Written {manifest.now()} from {run.path}.",
        facts=facts(run),
        sections=sections,
        has_plots=bool(plots),
        plotly_js=Markup(get_plotlyjs()) if plots else "",
        plots_json=Markup(_script_json(plots)),
        is_number=lambda cell: cell[:1].isdigit() and not cell[-1:].isalpha(),
    )


def _script_json(value: Any) -> str:
    """JSON that can stand in a script element, whatever text it holds."""
    return json.dumps(value, default=_plain).replace("<", "\\u003c")


def _plain(value: Any) -> Any:
    return value.to_plotly_json() if hasattr(value, "to_plotly_json") else list(value)


def write_report(run_dir: Path, compare: Path | None = None) -> Path:
    path = run_dir / REPORT_NAME
    write_text(path, render(run_dir, compare))
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m common.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="run.dir of the configuration")
    parser.add_argument("--compare", type=Path, metavar="RUN_DIR", help="show another run beside it")
    arguments = parser.parse_args(argv)
    for path in filter(None, (arguments.run_dir, arguments.compare)):
        if not path.is_dir():
            parser.exit(2, f"{path}: no such run directory\n")
    try:
        sys.stdout.write(f"{write_report(arguments.run_dir, arguments.compare)}\n")
    except PipelineError as error:
        parser.exit(2, f"{error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
