"""What a benchmark claims, with the figures behind it: benchmarks/results/NAME.json, one object a claim."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.files import write_json

RESULTS_DIR = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Claim:
    """`ratio` ours over theirs (a median over alternating rounds), the bar it has to pass, and the rounds' range."""

    claim: str
    ratio: float
    at_least: float | None
    spread: list[float]
    figures: dict[str, Any] = field(default_factory=dict)


def claim_of(text: str, ours: Sequence[float], theirs: Sequence[float], *, at_least: float, **figures: Any) -> Claim:
    """A claim from rates measured in alternating rounds: round i compares ours[i] with theirs[i]."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    shown = {"ours": [round(x, 1) for x in ours], "theirs": [round(x, 1) for x in theirs]} | figures
    spread = [round(ratios[0], 3), round(ratios[-1], 3)]
    return Claim(text, round(statistics.median(ratios), 3), at_least, spread, shown)


def alternating(rounds: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Runs the measures in turn, `rounds` times, so that a machine that slows down slows all of them."""
    found: list[list[float]] = [[] for _ in measures]
    for _ in range(rounds):
        for values, measure in zip(found, measures, strict=True):
            values.append(measure())
    return found


def record(name: str, claims: Sequence[Claim]) -> None:
    write_json(RESULTS_DIR / f"{name}.json", [asdict(claim) for claim in claims])
    show(claims)


def show(claims: Sequence[Claim]) -> None:
    for claim in claims:
        bar = f" (bar {claim.at_least})" if claim.at_least is not None else ""
        print(f"{claim.claim}: {claim.ratio}{bar}, spread {claim.spread}")
        print(json.dumps(claim.figures))
