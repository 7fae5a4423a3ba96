"""The tables of README and docs, as Markdown, from committed result files."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

from house import house_table
from markdown_tables import RESULTS, result, table
from matcha.distributed.options import EXCLUSIONS
from matcha.rounds import MIXINGS
from matcha.strategies import STRATEGIES
from matcha.tuning import advice
from matcha.wires import WIRES
from network_tables import (
    cifar100_long,
    headline,
    headline_settings,
    headline_short,
    overlap,
    unkind,
    wire_costs,
    wire_networks,
    wires,
)
from reproduction.comparisons import Results
from reproduction.paper import ER8, GEOMETRIC, group
from reproduction.trials import read_results
from tiers import long_table


def tradeoff_table() -> str:
    """Consensus error by strategy and budget on the two graphs of the picture."""
    document = result("tradeoff.json")
    known = {(p["graph"], p["strategy"], p["budget"]): p for p in document["points"]}
    strategies = [s for s in ("periodic", "matcha", "greedy") if ("er8", s, 0.1) in known]
    rows = []
    for graph in document["num_colors"]:
        for budget in (0.02, 0.1, 0.3, 0.5):
            errors = [known[graph, s, budget]["consensus_error"] for s in strategies]
            units = known[graph, "matcha", budget]["comm_units"]
            rows.append([graph, budget, f"{units:.2g}", *(f"{e:.2f}" for e in errors)])
        last = known[graph, "vanilla", 1.0]
        rows.append(
            [graph, "1 (vanilla)", f"{last['comm_units']:g}"]
            + [f"{last['consensus_error']:.2f}"] * len(strategies)
        )
    headings = ["graph", "budget", "units per iteration", *strategies]
    return table(headings, rows, "ll" + "r" * (len(headings) - 2))


def crossings() -> str:
    """What it costs to be as close together as vanilla keeps the workers."""
    rows = [
        [
            f"`paper:{row['graph']}`",
            "1",
            *(f"{row[name]:.2f}" for name in ("matcha_paper", "matcha_best")),
            f"**{row['greedy']:.2f}**",
            f"{row['no_less']:.2f}",
        ]
        for row in result("strategies.json")["crossings"]
    ]
    return table(["graph", "vanilla", "paper", "matcha", "greedy", "no less than"], rows, "lrrrrr")


def planner() -> str:
    """Seconds, memory and gap of the planner, and of cvxpy's solvers where they were run."""
    document = result("planner.json")
    names = {"erdos-renyi": "Erdős–Rényi", "geometric": "geometric"}
    rows = [
        [
            names[r["family"]],
            f"{r['workers']:,}",
            f"{r['links']:,}",
            r["who"],
            f"{r['eq5_s']:.2f}",
            f"{r['eq9_s']:.2f}",
            f"{r['gap']:.0e}" if "gap" in r else "–",
            f"{r['peak_mb']:.0f}",
        ]
        for r in document["rows"]
    ]
    headings = ["graph", "workers", "links", "by", "eq. 5, s", "eq. 9, s", "gap", "peak MB"]
    ours = {
        r["family"]: r["total_s"]
        for r in document["rows"]
        if r["who"] == "matcha" and r["workers"] == 64
    }
    ratios = [
        f"{r['total_s'] / ours[r['family']]:.0f}× ({names[r['family']]})"
        for r in document["rows"]
        if r["who"] == "CLARABEL"
    ]
    return (
        table(headings, rows, "lrrlrrrr")
        + f"\nFaster than CLARABEL at 64 workers: {', '.join(ratios)}. "
        + f"Machine: {document['machine']}.\n"
    )


def decompositions() -> str:
    """ρ by decomposition on the paper's graphs."""
    document = result("decompositions.json")
    rows = [
        [row["graph"], *(f"{value:.4f}" for value in row["rho"].values())]
        for row in document["rows"]
    ]
    headings = ["graph", "authors' matchings", "effort `none`", "`default`", "`high`"]
    return table(headings, rows, "lrrrr")


def _trained(name: str) -> Results:
    """A group's runs at the rate tuned on vanilla, all of the same number of epochs."""
    chosen = group(name)
    runs = read_results([RESULTS / "reproduction" / f"{name}.jsonl"])
    equal = [run for run in runs if run.trial.stretch == 1]
    return Results.of(equal, chosen.task, chosen.delays)


def training() -> str:
    """CIFAR-100 on eight workers: accuracy against communication, means over seeds."""
    results, order = _trained("cifar100"), ["vanilla", "matcha", "periodic", "greedy"]
    seeds = [results.seeds(ER8, label) for label in results.labels(ER8)]
    rows = []
    for runs in sorted(seeds, key=lambda r: (-r[0].trial.budget, order.index(r[0].trial.strategy))):
        trial = runs[0].trial
        accuracies = [run.final("test_accuracy") or 0.0 for run in runs]
        spread = f" ± {100 * stdev(accuracies):.1f}" if len(runs) > 1 else ""
        rows.append(
            [
                trial.strategy,
                f"{trial.budget:g}",
                f"{results.final(ER8, trial.label, 'comm_units'):,.0f}",
                f"{results.final(ER8, trial.label, results.loss):.3f}",
                f"{100 * fmean(accuracies):.1f}{spread} %",
                len(runs),
            ]
        )
    headings = [
        "strategy", "budget", "matchings exchanged", results.loss_name, "test accuracy", "seeds",
    ]  # fmt: skip
    return table(headings, rows, "llrrrr")


def geometric() -> str:
    """CIFAR-10 on sixteen workers: accuracy on the paper's three graphs."""
    results = _trained("cifar10")

    def accuracy(graph: str, label: str) -> str:
        points = results.final(graph, label, "test_accuracy")
        if points is None:
            return "–"
        return f"{100 * points:.1f} %" if points == points else "diverged"

    rows = []
    for graph, budget in GEOMETRIC.items():
        equal = [accuracy(graph, f"{s} {budget:g}") for s in ("matcha", "periodic", "greedy")]
        tenth = [accuracy(graph, f"{s} 0.1") for s in ("matcha", "greedy")]
        rows.append([f"`{graph}`", accuracy(graph, "vanilla"), f"{budget:g}", *equal, *tenth])
    headings = [
        "graph", "vanilla", "budget", "matcha", "periodic", "greedy", "matcha at 0.1",
        "greedy at 0.1",
    ]  # fmt: skip
    return table(headings, rows, "lrrrrrrr")


def exchange() -> str:
    """The exchange against the least that could carry the bytes."""
    document = result("exchange.json")
    rows = []
    for row in document["comparisons"]:
        ms = row["milliseconds"]
        average = ms.get("and average")
        rows.append(
            [
                row["link"],
                f"{row['megabytes']} MB",
                row["reference"],
                f"{ms[row['reference']]:.1f}",
                f"{average:.1f}" if average else "–",
                f"{ms['messages']:.1f}",
                f"{ms['exchange']:.1f}",
                f"{row['messages_ratio']:.2f}",
                f"{row['exchange_ratio']:.2f}",
            ]
        )
    headings = ["link", "size", "reference", "ms", "and average", "messages", "exchange"]
    beyond = {m["rule"]: m for m in document["memory"]}
    return (
        table([*headings, "messages ÷ ref.", "exchange ÷ ref."], rows, "lrlrrrrrr")
        + f"\nA round without a partner takes {document['empty_round']['microseconds']:.1f} µs. "
        + f"Memory beyond a model of {beyond['eq2']['model_megabytes']:.0f} MB: "
        + f"{beyond['eq2']['beyond_megabytes']:.0f} MB, and "
        + f"{beyond['footnote']['beyond_megabytes']:.0f} MB with `overlap=True`. "
        + f"Machine: {document['machine']}, torch {document['torch']}.\n"
    )


def simulation(name: str) -> str:
    """Examples per second of the simulator, against a loop over models and one large batch."""
    document = result(f"simulation_{name}.json")
    rows = [
        [
            case["case"],
            f"{case['num_workers']} × {case['batch_size']}",
            f"{case['parameters']:,}",
            _thousands(case["loop"]),
            _thousands(case["engine"][case["best"]]),
            _ratio(case["times_loop"], "×"),
            _ratio(case["share_of_whole"], "%"),
        ]
        for case in document["cases"]
    ]
    machine = document["machine"]
    headings = [
        "model",
        "workers × batch",
        "parameters",
        "loop",
        "engine",
        "÷ loop",
        "of one batch",
    ]
    return (
        table(headings, rows, "lrrrrrr")
        + f"\nMachine: {machine['device']}, {machine['cores']} cores, torch {machine['torch']}.\n"
    )


def _thousands(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _ratio(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}×" if unit == "×" else f"{value:.0%}"


def greedy_errors() -> str:
    """Consensus error of matcha by its own and the authors' matchings, and of greedy."""
    rows = [
        [
            row["graph"],
            row["budget"],
            *(
                f"{row['formula'][k]:.3g}"
                for k in ("matcha, searched", "matcha", "matcha, pairwise", "greedy")
            ),
            f"{row['simulation']['greedy']['mean']:.3g} ± "
            f"{row['simulation']['greedy']['half_width']:.1g}",
            f"{row['doubling_bound']:.3g}",
            f"{row['formula']['matcha, searched'] / row['formula']['greedy']:.1f}×",
        ]
        for row in result("strategies.json")["errors"]
    ]
    headings = [
        "graph",
        "budget",
        "matcha",
        "authors' matchings",
        "pairwise",
        "greedy",
        "simulated (95 %)",
        "no schedule below",
        "gain",
    ]
    return table(headings, rows, "ll" + "r" * 7)


def greedy_crossings() -> str:
    """Budgets that reach vanilla's error, and greedy's share of matcha's."""
    rows = [
        [
            row["graph"],
            *(f"{row[k]:.3f}" for k in ("matcha_best", "matcha_paper", "greedy")),
            *(f"{row[k]:.2f}" for k in ("share_best", "possible_best", "share_paper")),
        ]
        for row in result("strategies.json")["crossings"]
    ]
    headings = [
        "graph",
        "matcha, best α",
        "matcha, paper's α",
        "greedy",
        "share of best α",
        "no schedule below",
        "share of paper's α",
    ]
    return table(headings, rows, "l" + "r" * 6)


def greedy_slow() -> str:
    """Unequal links, equal seconds."""
    rows = [
        [
            row["graph"],
            row["budget"],
            f"{row['seconds']['greedy']:.3g}",
            *(f"{row['error'][k]:.3g}" for k in ("matcha", "blind", "greedy")),
        ]
        for row in result("strategies.json")["slow_links"]
    ]
    headings = ["graph", "budget", "seconds", "matcha", "greedy, times unknown", "greedy"]
    return table(headings, rows, "ll" + "r" * 4)


def greedy_free() -> str:
    """Complete graphs against sequences made for them."""
    rows = [
        [
            row["workers"],
            row["units"],
            *(
                "–" if row.get(k) is None else f"{row[k]:.3g}"
                for k in ("greedy", "one_way", "one_peer", "finite_time", "ceca", "no_less")
            ),
        ]
        for row in result("strategies.json")["free_links"]
    ]
    headings = [
        "workers",
        "units per iteration",
        "greedy",
        "greedy, one-way",
        "one-peer exponential",
        "hypercube, base",
        "ceca",
        "no schedule below",
    ]
    return table(headings, rows, "r" * len(headings))


def printed(name: str) -> str:
    """What a benchmark printed, as it printed it."""
    text = (RESULTS / name).read_text(encoding="utf-8").strip("\n")
    return f"```text\n{text}\n```\n"


def one_way() -> str:
    """Complete graphs at one unit per iteration: strategies of one-way messages side by side."""
    rows = result("limits.json")["directed"]
    names = list(rows[0]["error"])
    body = [
        [row["workers"], *(f"{row['error'][n]:.3g}" for n in names), f"{row['no_less']:.3g}"]
        for row in rows
    ]
    return table(["workers", *names, "no schedule below"], body, "r" * (len(names) + 2))


def exclusions() -> str:
    """Which options of `Gossip` do not go together, and why."""
    rows = [[e.first.name, e.second.name, f"{e.reason}."] for e in EXCLUSIONS]
    return table(["choice", "does not go with", "since"], rows)


def strategies() -> str:
    """The registry: what each strategy does, mixes by and takes."""
    rows = [
        (
            f"`{name}`",
            f"`{strategy.__name__}`",
            strategy.about,
            ", ".join(f"`{mixing}`" for mixing in strategy.mixings),
            ", ".join(f"`{option}`" for option in strategy.options()) or "–",
        )
        for name, strategy in STRATEGIES.items()
    ]
    return table(("name", "class", "what it does", "mixing", "options"), rows)


def names() -> str:
    """Every name that can be asked for, from where the code lists it."""
    kinds = {"strategies": STRATEGIES, "mixings": MIXINGS, "wires": WIRES}
    lines = [f"- {kind}: {', '.join(f'`{n}`' for n in known)}" for kind, known in kinds.items()]
    return "\n".join(lines) + "\n"


def _language_models(model: str) -> list[dict[str, Any]]:
    """Each method at its best learning rate of seed 0, from most bytes to fewest."""
    lines = (RESULTS / "language.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [run for run in map(json.loads, lines) if run["model"] == model]
    found = []
    for method in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == method]
        best = min((run for run in own if run["seed"] == 0), key=lambda run: run["loss"])
        losses = [run["loss"] for run in own if run["rate"] == best["rate"]]
        spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
        said = {
            "name": f"`{method}`",
            "is_ours": method.startswith(("g3-", "three-")),
            "bytes": _share(best["share"]),
            "mean": fmean(losses),
            "loss": f"{_loss(fmean(losses))}{spread}",
            "rates": ", ".join(f"{r:g}" for r in sorted({run["rate"] for run in own})),
        }
        found.append(best | said)
    return sorted(found, key=lambda run: (-run["share"], run["mean"]))


def language() -> str:
    """Language models: each method at its best learning rate, from most bytes to fewest."""
    rows = [
        [run["name"], run["bytes"], run["loss"], f"{run['rate']:g}", run["rates"]]
        for run in _language_models("transformer-14m")
    ]
    return table(["method", "bytes", "validation loss", "rate", "rates tried"], rows, "lrrrl")


def language_short() -> str:
    """The lowest loss of others and of this project's plans, by how many bytes are to be had."""
    runs = [run for run in _language_models("transformer-14m") if run["share"]]

    def best(level: int, *, ours: bool) -> str:
        able = [r for r in runs if r["is_ours"] == ours and r["share"] <= 1.01 / level]
        run = min(able, key=lambda r: r["mean"], default=None)
        return f"{run['loss']} ({run['name']}, {run['bytes']})" if run else "not run"

    rows = [
        [f"1/{level}" if level > 1 else "all", best(level, ours=False), best(level, ours=True)]
        for level in (1, 8, 32, 128, 280, 700, 2000)
    ]
    return table(["bytes at most", "others", "this project"], rows, "rll")


def advise() -> str:
    """What `matcha advise` says of 100 MB on eight workers behind a switch of 1 Gbit/s."""
    found = advice.advise(8, compute_time=0.1, model_mb=100, link_mbps=1000)
    rows = []
    for choice in found.choices:
        name = f"**{choice.name}**" if choice is found.best else choice.name
        least, most = (f"{n:.2f}" for n in choice.iterations)
        rows.append(
            [
                name,
                f"{choice.iteration_seconds:.3g}",
                f"{choice.megabytes:.3g}",
                f"{choice.disagreement:.2g}",
                least if least == most else f"{least} to {most}",
                f"{choice.seconds:.3g}",
            ]
        )
    heads = ["", "s per iteration", "MB sent", "disagreement", "× iterations", "s for as much"]
    return f"{table(heads, rows, 'lrrrrr')}\n*{found.sentence}*\n"


def moments() -> str:
    """What sharing first moments is worth on a tiny language model, by learning rate."""
    found = json.loads((RESULTS / "moments.json").read_text(encoding="utf-8"))
    rows = [
        [row["method"], _share(row["share"]), *(map(_loss, row["losses"]))] for row in found["rows"]
    ]
    rates = [f"rate {rate:g}" for rate in found["rates"]]
    return table(["exchange", "bytes", *rates], rows, "lr" + "r" * len(rates))


def relaysgd(*, long: bool = False, small: bool = False) -> str:
    """CIFAR-10 whose classes differ: test accuracy of the average model, the best first."""
    file = f"relaysgd_{'small' if small else 'h200'}.jsonl"
    lines = (RESULTS / file).read_text(encoding="utf-8").splitlines()
    known = [line for line in map(json.loads, lines) if long == (line["run"]["epochs"] >= 200)]
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in known:
        run = {"clip": 0.0} | line["run"]
        rule = run["momentum"] + (f", clip {run['clip']:g}" if run["clip"] else "")
        plan, wire = f"{run['strategy']}, {run['topology']}", f"`{run['wire']}`"
        numbers = f"{run['concentration']:g}", f"{run['rate']:g}", f"{run['epochs']}"
        found.setdefault((numbers[0], plan, wire, rule, *numbers[1:]), []).append(line)

    def scores(runs: list[dict[str, Any]]) -> list[float]:
        return [100 * (run["records"][-1].get("test_accuracy") or 0.0) for run in runs]

    most = max(line["records"][-1]["megabytes_sent"] for line in known)
    rows = []
    for key, runs in sorted(found.items(), key=lambda item: (item[0][0], -fmean(scores(item[1])))):
        own, share = scores(runs), runs[0]["run"]["bytes"]
        if small:  # a share of this network's
            share = runs[0]["records"][-1]["megabytes_sent"] / most
        spread = f" ± {stdev(own):.1f}" if len(own) > 1 else ""
        lost = any(run["records"][-1].get("train_loss") is None for run in runs)
        said = "diverged" if lost else f"{fmean(own):.1f}{spread} %"
        part = "1" if share == 1 else f"1/{1 / share:.3g}"
        rows.append([key[0], part, *key[1:], said, f"{len(runs)}"])
    head = ["Dirichlet", "bytes", "plan", "wire", "momentum", "rate", "epochs", "test accuracy"]
    return table([*head, "seeds"], rows, "rrlllrrrr")


def _share(share: float) -> str:
    """Bytes as a fraction; small denominators with a digit more, large ones grouped."""
    if not share:
        return "none"
    return f"1/{1 / share:,.0f}" if share < 0.01 else f"1/{1 / share:.3g}"


def _loss(value: float | None) -> str:
    return "diverged" if value is None or value == float("inf") else f"{value:.3f}"


REGIONS: dict[str, Callable[[], str]] = {
    "advise": advise,
    "language": language,
    "language-short": language_short,
    "moments": moments,
    "relaysgd": lambda: relaysgd(long=True),
    "relaysgd-screen": relaysgd,
    "relaysgd-small": lambda: relaysgd(small=True),
    "one-way": one_way,
    "crossings": crossings,
    "decompositions": decompositions,
    "exchange": exchange,
    "exclusions": exclusions,
    "greedy-crossings": greedy_crossings,
    "greedy-errors": greedy_errors,
    "greedy-free": greedy_free,
    "greedy-slow": greedy_slow,
    "headline": headline,
    "names": names,
    "strategies": strategies,
    "house": house_table,
    "long": long_table,
    "headline-settings": headline_settings,
    "headline-short": headline_short,
    "unkind": unkind,
    "wire-costs": wire_costs,
    "wire-networks": wire_networks,
    "wires": wires,
    "wires-long": lambda: wires(epochs=200),
    "cifar100-long": cifar100_long,
    "wires-differ": lambda: wires("cifar10", 40),
    "wires-differ-part": lambda: wires("cifar10", 40, 16_000),
    "wires-lstm": lambda: wires("ptb", 8),
    "wires-transformer": lambda: wires("ptb-transformer", 15),
    "overlap": overlap,
    "simulation-cpu": lambda: simulation("cpu"),
    "simulation-h200": lambda: simulation("h200"),
    "planner": planner,
    "tradeoff-table": tradeoff_table,
    "training": training,
    "geometric": geometric,
}


def region(name: str) -> str:
    """What stands between the marks of a name; `printed:FILE` is a benchmark's own output."""
    kind, _, file = name.partition(":")
    body = printed(file) if kind == "printed" else REGIONS[name]()
    return f"\n{body}\n"  # Markdown wants a blank line between a comment and a table
