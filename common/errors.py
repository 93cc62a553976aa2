"""Problems that the operator can mend, gathered and reported once.

Anything raised as `PipelineError` ends a stage with status 2 and no traceback; every other exception is a bug.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where it is, what was expected and found, and how to mend it."""

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}"]
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class PipelineError(Exception):
    """One or more problems that the operator can mend."""

    def __init__(self, *problems: Problem) -> None:
        assert problems, "a PipelineError says what is wrong"
        super().__init__("\n".join(str(p) for p in problems))
        self.problems: tuple[Problem, ...] = problems


class Problems:
    """Gathers problems so that they can be reported together."""

    def __init__(self) -> None:
        self._found: list[Problem] = []

    def add(self, where: str, what: str, fix: str = "") -> None:
        self._found.append(Problem(where, what, fix))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Absorbs a `PipelineError` raised inside the block, so that later checks still run."""
        try:
            yield
        except PipelineError as error:
            self._found.extend(error.problems)

    def raise_if_any(self) -> None:
        if self._found:
            raise PipelineError(*dict.fromkeys(self._found))

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def some(items: Sequence[object], limit: int = 3) -> str:
    """The first few items and how many more there are: `17, 402, 977 and 16 more`."""
    shown = ", ".join(str(item) for item in items[:limit])
    return f"{shown} and {len(items) - limit} more" if len(items) > limit else shown
