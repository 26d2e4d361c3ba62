"""Command-line options as data, shared by ``paragrad train`` and ``serve``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer


@dataclass(frozen=True)
class Flag:
    """One option. If it is not given, the command receives None and applies a default later."""

    name: str
    kind: Any
    help: str
    metavar: str | None = None
    parser: Callable[[str], Any] | None = None
    spelled: tuple[str, ...] = ()

    def annotation(self, panel: str | None) -> Any:
        """Return the option as typer declares it."""
        kind = str if self.parser is not None else self.kind
        text = self.help.replace("[", "\\[")
        option = typer.Option(*self.spelled, metavar=self.metavar, help=text, parser=self.parser, rich_help_panel=panel)
        return Annotated[kind | None, option]


def with_flags(*panels: tuple[str | None, Sequence[Flag]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of some help panels to a command, which takes them as keywords."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        mine = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own if parameter.kind != parameter.VAR_KEYWORD]
        made = [
            inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag.annotation(panel))
            for panel, flags in panels
            for flag in flags
        ]
        command.__signature__ = inspect.Signature([*mine, *made])  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*mine, *made)}
        return command

    return wrap


def number(text: str) -> float | str:
    """Parse a number, or the word none."""
    if text.lower() == "none":
        return "none"
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor 'none'.") from None


def names(text: str) -> list[str]:
    """Parse a comma-separated list of names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def lengths(text: str) -> int | dict[str, int]:
    """Parse one length, or lengths by column."""
    try:
        if "=" not in text:
            return int(text)
        return {name.strip(): int(length) for name, _, length in (piece.partition("=") for piece in text.split(","))}
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a length, such as 10, nor lengths by column, such as jet_pt=4,jet_eta=4."
        ) from None
