"""Tasks by name, each with the model and hyperparameters that the paper (or custom) uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import nn

from matcha._io import load_object
from matcha.errors import InputError, unknown_name
from matcha.training.optimizers import SGD, Optimizer, adamw, make_optimizer
from matcha.training.rates import Constant, Cosine, Plateau, RateSchedule, StepDecay
from matcha.training.settings import Settings
from matcha.training.task import Task, TaskSpec
from matcha.zoo import data as sets
from matcha.zoo.corpus import read_corpus
from matcha.zoo.data import PartitionKind, partition
from matcha.zoo.images import ImageTask
from matcha.zoo.language import LanguageTask, TextTask
from matcha.zoo.models import LanguageModel, Transformer, maker
from matcha.zoo.quadratics import QuadraticTask

_ADAM_RATE = 0.001  # recipes' own rates are for SGD, and fifty times too large for Adam
_MOMENTUM = SGD(momentum=0.9, nesterov=True, weight_decay=1e-4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What a user may choose about a task; None takes the recipe's value."""

    num_workers: int
    data: str | Path | None = None
    """Folder of the data sets; None reads ``$MATCHA_DATA``."""
    model: str | None = None
    batch_size: int | None = None
    partition: PartitionKind = "iid"
    concentration: float = 0.5
    """Concentration of a Dirichlet partition: the smaller, the more heterogeneous the data."""
    num_train: int | None = None
    """Use only this many training examples, drawn at random."""
    num_test: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise InputError(
                f"the seed is {self.seed}, but PyTorch takes a whole number from 0 to 2^63 − 1."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A task and how it is usually trained."""

    name: str
    description: str
    make: Callable[[Recipe, Choices], Task]
    model: str
    batch_size: int = 16
    epochs: int = 20
    learning_rate: float = 0.05
    optimizer: Optimizer = field(default_factory=lambda: _MOMENTUM)
    length: int = 35
    """Words a batch and place, where the examples are text."""
    decay: str = "steps"
    """``steps`` (÷ 10 at each milestone, warmed up), ``plateau`` (÷ 4), ``cosine`` (to a tenth,
    warmed up) or ``none``."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Of ``steps``, in shares of the epochs."""
    warmup: float = 0.05
    """Of ``steps``, likewise; the rate climbs from a tenth."""

    def __reduce__(self) -> tuple[Callable[[str], Recipe], tuple[str]]:
        """Travel to other processes by name: what makes a task is code."""
        if ":" not in self.name and RECIPES.get(self.name) is not self:
            raise TypeError(f"the recipe {self.name!r} is not one that another process can find")
        return recipe, (self.name,)

    def task(self, choices: Choices) -> Task:
        """Build the task."""
        for name in ("batch_size", "num_train", "num_test"):
            number = getattr(choices, name)
            if number is not None and number < 1:
                raise InputError(f"{name} must be 1 or more, not {number}")
        return self.make(self, choices)

    def spec(self, choices: Choices, *, seed: int | None = None) -> TaskSpec:
        """The task as a job holds it: named, described, and made when the job runs."""
        if seed is not None:
            choices = replace(choices, seed=seed)
        batch_size = self.examples_per_batch(choices) or None
        described = replace(choices, model=self.model_name(choices), batch_size=batch_size)
        make = partial(self.task, choices)
        return TaskSpec(name=self.name, seed=choices.seed, choices=asdict(described), make=make)

    def model_name(self, choices: Choices) -> str:
        """The model chosen, or else the recipe's."""
        return self.model if choices.model is None else choices.model

    def examples_per_batch(self, choices: Choices) -> int:
        """The batch size chosen, or else the recipe's."""
        return self.batch_size if choices.batch_size is None else choices.batch_size

    def settings(
        self,
        *,
        epochs: int | None = None,
        learning_rate: float | None = None,
        optimizer: str | None = None,
        **choices: Any,
    ) -> Settings:
        """How it is usually trained, with choices of your own.

        Args:
            epochs: None takes the recipe's.
            learning_rate: None takes the recipe's, and 0.001 for another optimizer of Adam's kind.
            optimizer: by name, instead of the recipe's.
            choices: of `Settings`.
        """
        if learning_rate is None and optimizer in ("adam", "adamw", "muon"):
            learning_rate = _ADAM_RATE
        number = self.epochs if epochs is None else epochs
        return Settings(
            epochs=number,
            schedule=self.schedule(number, learning_rate),
            optimizer=self.optimizer if optimizer is None else make_optimizer(optimizer),
            **choices,
        )

    def schedule(self, epochs: int, learning_rate: float | None = None) -> RateSchedule:
        """The learning rate over a run of that many epochs, the paper's decays scaled to it."""
        if epochs < 1:
            raise InputError(f"epochs must be 1 or more, not {epochs}")
        base = self.learning_rate if learning_rate is None else learning_rate
        if self.decay == "plateau":
            return Plateau(base=base, factor=4)
        if self.decay == "steps":
            return StepDecay(
                base=base,
                milestones=tuple(share * epochs for share in self.milestones),
                warmup=self.warmup * epochs,
                start=0.1 * base,
            )
        if self.decay == "cosine":
            return Cosine(base=base, epochs=epochs, warmup=0.04 * epochs)
        return Constant(base=base)


def _images(
    load: Callable[[Choices], sets.Images], *, augment: bool = False, flat: bool = False
) -> Callable[[Recipe, Choices], Task]:
    def make(recipe: Recipe, choices: Choices) -> Task:
        if flat:
            _refuse(recipe, choices, "model")
        images = load(choices).subset(choices.num_train, choices.num_test)
        parts = partition(
            images.train_labels,
            choices.num_workers,
            choices.partition,
            seed=choices.seed,
            concentration=choices.concentration,
        )
        features = int(np.prod(images.train_images.shape[1:]))
        model: Callable[[], nn.Module] = partial(nn.Linear, features, images.num_classes)
        if not flat:
            model = maker(recipe.model_name(choices), images.num_classes)
        return ImageTask(
            recipe.name,
            images,
            parts,
            model,
            batch_size=recipe.examples_per_batch(choices),
            seed=choices.seed,
            augment=augment,
            flat=flat,
        )

    return make


def _refuse(recipe: Recipe, choices: Choices, *names: str) -> None:
    """A choice that a task ignores is an error: the user would believe that it took effect."""
    usual = Choices(num_workers=choices.num_workers)
    for name in names:
        if (value := getattr(choices, name)) != getattr(usual, name):
            raise InputError(f"the task {recipe.name} has no choice of {name}, but got {value!r}")


def _quadratic(recipe: Recipe, choices: Choices) -> Task:
    _refuse(recipe, choices, "model", "batch_size", "partition", "num_train", "num_test")
    return QuadraticTask(choices.num_workers, heterogeneity=1.0, seed=choices.seed)


def _language(recipe: Recipe, choices: Choices) -> Task:
    _refuse(recipe, choices, "partition")
    text = sets.penn_treebank(choices.data).head(choices.num_train, choices.num_test)
    words = len(text.vocabulary)
    models: dict[str, Callable[[], LanguageModel | Transformer]] = {
        "lstm": partial(LanguageModel, words, 1500),
        "lstm-small": partial(LanguageModel, words, 200, dropout=0.2),
        "transformer": partial(Transformer, words),
        "transformer-small": partial(Transformer, words, 64, 2, 2, dropout=0.1),
    }
    name = recipe.model_name(choices)
    if name not in models:
        raise unknown_name("language model", name, models)
    return LanguageTask(
        recipe.name,
        text,
        choices.num_workers,
        models[name],
        batch_size=recipe.examples_per_batch(choices),
        length=recipe.length,
        seed=choices.seed,
    )


_TEXT_MODELS: dict[str, dict[str, int]] = {
    "transformer-1m": {"size": 96, "num_layers": 4, "num_heads": 3},
    "transformer-14m": {"size": 384, "num_layers": 6, "num_heads": 6},
    "transformer-50m": {"size": 640, "num_layers": 9, "num_heads": 10},
}


def _text(recipe: Recipe, choices: Choices) -> Task:
    name = recipe.model_name(choices)
    if name not in _TEXT_MODELS:
        raise unknown_name("language model", name, _TEXT_MODELS)
    corpus = read_corpus(sets.data_directory(choices.data)).head(choices.num_train)
    own: dict[str, Any] = {
        **_TEXT_MODELS[name],
        "length": recipe.length,
        "dropout": 0.0,
        "batch_first": True,
    }
    return TextTask(
        recipe.name,
        corpus,
        choices.num_workers,
        partial(Transformer, corpus.num_tokens, **own),
        batch_size=recipe.examples_per_batch(choices),
        length=recipe.length,
        split=choices.partition,  # type: ignore[arg-type]  # checked by share()
        num_valid=choices.num_test,
        seed=choices.seed,
    )


_DIGITS = partial(_images, lambda _: sets.digits())
_CIFAR10 = _images(lambda choices: sets.cifar10(choices.data), augment=True)

_ALL = (
    Recipe(
        name="digits",
        description="scikit-learn's handwritten digits, a small CNN; needs no data folder",
        make=_DIGITS(),
        model="cnn",
    ),
    Recipe(
        name="logistic",
        description="logistic regression on the digits: convex, quick",
        make=_DIGITS(flat=True),
        model="linear",
        optimizer=SGD(weight_decay=1e-4),
    ),
    Recipe(
        name="quadratic",
        description="quadratics with known L, σ and ζ, for theory",
        make=_quadratic,
        model="point",
        batch_size=1,
        learning_rate=0.02,
        optimizer=SGD(),
        decay="none",
    ),
    Recipe(
        name="cifar10",
        description="CIFAR-10, the paper's ResNet-50 (Figures 4 and 5)",
        make=_CIFAR10,
        model="resnet50",
        batch_size=64,
        epochs=200,
        learning_rate=0.8,
    ),
    Recipe(
        name="cifar10-vgg11",
        description="CIFAR-10, VGG-11 without normalization: RelaySGD's Table 2",
        make=_CIFAR10,
        model="vgg11",
        batch_size=32,
        epochs=200,
        learning_rate=0.1,
        milestones=(0.75, 0.9),
        warmup=0.025,
    ),
    Recipe(
        name="cifar100",
        description="CIFAR-100, WideResNet-28-10 (Figures 1 and 4)",
        make=_images(lambda choices: sets.cifar100(choices.data), augment=True),
        model="wideresnet28-10",
        batch_size=64,
        epochs=200,
        learning_rate=0.8,
        optimizer=SGD(momentum=0.9, nesterov=True, weight_decay=5e-4),
    ),
    Recipe(
        name="ptb",
        description="Penn Treebank, a two-layer LSTM of 1500 (Figure 4)",
        make=_language,
        model="lstm",
        batch_size=10,
        epochs=40,
        learning_rate=40.0,
        optimizer=SGD(clip_norm=0.25),
        decay="plateau",
    ),
    Recipe(
        name="ptb-transformer",
        description="Penn Treebank, a transformer of 10.6 million parameters with AdamW",
        make=_language,
        model="transformer",
        learning_rate=1e-3,
        optimizer=adamw(weight_decay=0.1, clip_norm=1.0),
        length=64,
    ),
    Recipe(
        name="text",
        description="your folder of text files, transformers of 1, 14 or 50 million parameters",
        make=_text,
        model="transformer-14m",
        epochs=10,
        learning_rate=3e-3,
        optimizer=adamw(beta2=0.95, weight_decay=0.1, clip_norm=1.0),
        length=256,
        decay="cosine",
    ),
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""Tasks by name."""


def recipe(name: str) -> Recipe:
    """The recipe of a task.

    >>> recipe("cifar10").model
    'resnet50'

    Your own is `module:object`: a `Recipe`, or a function of `num_workers`, `seed` and more of
    `Choices`.
    """
    if ":" in name:
        return _own(name)
    if name not in RECIPES:
        raise unknown_name("task", name, RECIPES)
    return RECIPES[name]


def _own(name: str) -> Recipe:
    """A user's recipe by `module:object`, or one for a function that makes a task.

    The function takes those of the fields of `Choices` that it names, `num_workers` and `seed`
    among them; those that it does not name cannot be chosen.
    """
    found = load_object(name, "task")
    if isinstance(found, Recipe):
        return replace(found, name=name)
    if not callable(found):
        raise InputError(
            f"the task {name!r} is {type(found).__name__}, not a function or a Recipe."
        )
    taken, free = signature(found).parameters, [field.name for field in fields(Choices)]
    needed = [n for n, p in taken.items() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    if unknown := set(needed) - {*free}:
        raise InputError(
            f"the task {name!r} asks for {', '.join(sorted(unknown))}, but a task is made of "
            f"{', '.join(free)}."
        )
    size = taken["batch_size"].default if "batch_size" in taken else None

    def make(recipe: Recipe, choices: Choices) -> Task:
        _refuse(recipe, choices, *(n for n in free if n not in (*taken, "num_workers", "seed")))
        given = {n: value for n, value in asdict(choices).items() if n in taken}
        made = found(**{n: value for n, value in given.items() if value is not None})
        for member in ("steps_per_epoch", "tables", "loss"):
            if not hasattr(made, member):
                raise InputError(
                    f"{name} returned {made!r}, which is not a task: it has no {member}."
                )
        return cast(Task, made)

    return Recipe(
        name=name,
        description="your own",
        make=make,
        model="its own",
        batch_size=size if isinstance(size, int) else 0,
        epochs=10,
        decay="none",
    )
