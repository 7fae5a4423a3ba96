"""Help that fits a terminal of 80 columns: options in groups, in words that people know."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_type_hints

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from matcha.errors import InputError

COMMANDS = [
    "advise", "plan", "sweep", "tune", "simulate", "train", "report", "watch", "probe", "keys",
    "demo", "bench",
]  # fmt: skip
"""In the order in which one needs them."""
GROUPS = {
    "Plan": "topology strategies strategy period switch budgets budget wires wire seeds seed plans "
    "plan_file stage mixing matchings decomposition alpha effort delay_exponent worker_weights",
    "Training": "task epochs learning_rate batch_size optimizer momentum clip overlap model data "
    "alike partition concentration num_train num_test target_loss evaluate_every statistics "
    "plain_sgd outer rate_factors seconds quick max_trials target_gap initial_gap smoothness "
    "strong_convexity gradient_variance dissimilarity",
    "Network": "model_mb compute_time link_time latency link_mbps timeout links keys peers rank "
    "join listen elastic restarts replan speeds asynchronous events message_mb repetitions",
    "Launch": "device precision streams compile hosts rendezvous host_rank workers worker days",
    "Output": "output plot page format title explore report checkpoint_every resume "
    "tensorboard watch serve once refresh force as_json",
}
"""Options by their names: one that several commands share stands in the same group in each."""
_KINDS = {"float": "NUMBER", "int": "INTEGER", "Path": "PATH", "str": "TEXT"}
_WIDTH = 27  # of the column of names
_UsageError: Any = typer.BadParameter.__base__


class Command(TyperCommand):
    """A command whose help is ours."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print usage, description, arguments and options."""
        _print_help(self, ctx)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Say what is wrong with a command line as every other error is said."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        path = "matcha" if error.ctx is None else error.ctx.command_path
        raise InputError(f"{_what_is_wrong(error)} (`{path} --help` says more)") from None


def _what_is_wrong(error: Any) -> str:
    parameter, message, kind = error.__dict__.get("param"), error.message, type(error).__name__
    sentence = f"{message[:1].lower()}{message[1:]}".removesuffix(".")
    sentence = sentence if sentence.endswith("?") else f"{sentence}."
    if kind == "NoSuchOption":
        near = difflib.get_close_matches(error.option_name, error.possibilities or (), 1, 0.75)
        return f"there is no option {error.option_name}" + (
            f": did you mean {near[0]}?" if near else "."
        )
    if parameter is None:
        return sentence
    name = parameter.opts[0]
    name = name if name.startswith("-") else (parameter.metavar or name).strip("[]{}").upper()
    if kind == "MissingParameter":
        return f"{name} is missing."
    if "valid integer" in message:
        return f"{name} takes a whole number."
    if "valid number" in message or "valid float" in message:
        return f"{name} takes a number."
    return f"{name}: {sentence}"


class Group(TyperGroup):
    """A group of commands, in our order."""

    def make_context(self, *arguments: Any, **keywords: Any) -> Any:
        """Read the command line."""
        with one_sentence():
            return super().make_context(*arguments, **keywords)

    def invoke(self, ctx: Any) -> Any:
        """Read the rest of the command line and run the command."""
        with one_sentence():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands."""
        names = list(self.commands)
        return sorted(names, key=lambda n: COMMANDS.index(n) if n in COMMANDS else len(names))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print usage, description, commands and options."""
        _print_help(self, ctx)


def _print_help(command: Any, ctx: Any) -> None:
    console = Console()
    console.width = min(console.width, 100)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = [_argument(p) if p.required else f"[{_argument(p)}]" for p in arguments]
    usage += ["COMMAND"] if hasattr(command, "commands") else []
    console.print(f"Usage: [bold]{ctx.command_path}[/] ", end="")
    console.print(" ".join([*usage, "[OPTIONS]"]), markup=False, highlight=False)
    for paragraph in (command.help or "").split("\n\n"):
        # An indented paragraph, an example, stays as it was written.
        is_prose = not paragraph.startswith(" ")
        text = " ".join(paragraph.split()) if is_prose else f"  {paragraph.strip()}"
        console.print(f"\n{text}" if is_prose else text, highlight=False)
    for title, rows in _sections(command, ctx):
        console.print(f"\n[bold]{title}[/]")
        for name, text in rows:
            table = Table.grid(padding=(0, 1))
            table.add_column(width=_WIDTH, no_wrap=True)
            table.add_column()
            if len(name) + 2 > _WIDTH:
                console.print(f"  {name}", markup=False, highlight=False)
                name = ""
            table.add_row(f"  [cyan]{name}[/]" if name else "", text)
            console.print(table)
    console.print()


def _sections(command: Any, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Arguments, commands and each group of options, each with its name and its text."""
    shown = [p for p in command.get_params(ctx) if not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = {p.name: p for p in shown if p.param_type_name == "option"}
    if arguments:
        yield "Arguments", [(_argument(p), _text(p)) for p in arguments]
    if hasattr(command, "commands"):
        helps = {name: command.commands[name].help for name in command.list_commands(ctx)}
        first = {
            name: " ".join((text or "").split("\n\n")[0].split()) for name, text in helps.items()
        }
        yield "Commands", [(name, text.rstrip(".")) for name, text in first.items()]
    hints = get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}
    known = " ".join(GROUPS.values()).split()
    rest = " ".join(name for name in options if name not in known)
    for title, names in (GROUPS | {"Other": rest}).items():
        members = [options[name] for name in names.split() if name in options]
        if members:
            yield title, [(_spelling(p, str(hints.get(p.name))), _text(p)) for p in members]


def _argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _spelling(parameter: Any, hint: str) -> str:
    """An option as one types it, the short spelling first, and what it takes."""
    names = sorted([*parameter.opts, *parameter.secondary_opts], key=lambda n: n.startswith("--"))
    kind = parameter.metavar or next((word for kind, word in _KINDS.items() if kind in hint), "")
    return ", ".join(names) + ("" if parameter.is_flag else f" {kind}")


def _text(parameter: Any) -> str:
    """What an option is for, and what it is without being given."""
    text, default = parameter.help or "", parameter.default
    if parameter.required:
        return f"{text} Required." if parameter.param_type_name == "option" else text
    if isinstance(default, (list, tuple)):
        default = ", ".join(map(str, default))
    if default is None or default is False or default == "" or parameter.secondary_opts:
        return text
    value = f"{default:g}" if isinstance(default, float) else default
    return f"{text} [dim]\\[{value}][/]"
