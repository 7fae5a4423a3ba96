"""Tables of what was measured on real networks, and of small messages."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

from markdown_tables import result, result_lines, table
from matcha.wires import parse_wire
from matcha.zoo.models import build


def wires(task: str = "cifar100", epochs: int = 36, images: int = 0) -> str:
    """A task for ever fewer bytes, by the average model's test accuracy or loss."""
    score = "test accuracy" if task.startswith("cifar") else "validation loss"
    headings = ["bytes (vanilla: 1)", "strategy", "wire", "momentum", score, "seeds"]
    return table(headings, _scores(task, epochs, images), "llllrr")


def wire_costs() -> str:
    """What each wire saves and leaves, what coding costs, and what simulating it does."""
    on = {
        device: (result(f"wires{name}.json")["wires"], prefix)
        for device, (name, prefix) in _CODERS.items()
    }
    simulated = result("wires_speed.json")["seconds_per_iteration"]

    def row(name: str, smaller: str, left: str) -> list[str]:
        speeds = [
            f"{_speed(found[name][f'{by}encode_gb_s'])} / {_speed(found[name][f'{by}decode_gb_s'])}"
            if name in found
            else "–"
            for found, by in on.values()
        ]
        times = simulated.get(f"{name} local")
        ratio = f"{times / simulated['float32 local']:.2f}" if times else "–"
        return [f"`{name}`", smaller, left, *speeds, ratio]

    modulo = [
        row(name, f"{one['times_smaller']:.2g}", f"{one['share_left']:.2g}")
        for name, one in on["a core"][0].items()
    ]
    shapes = [tuple(p.shape) for p in build("wideresnet16-4", 100).parameters()]
    rank = f"{1 / parse_wire('lowrank:4').size_ratio(shapes):.0f} (WideResNet-16-4)"
    rows = [row("float32", "1", "0"), row("bfloat16", "2", "0"), *modulo]
    headings = ["wire", "times smaller", "share of a squared difference left"]
    headings += [f"encode / decode on {device}, GB/s" for device in on]
    headings += ["simulated iteration, × `float32`"]
    return table(headings, [*rows, row("lowrank:4", rank, "most of it")], "lrrrrrr")


def _speed(gigabytes: float) -> str:
    return f"{gigabytes:.0f}" if gigabytes >= 10 else f"{gigabytes:.2g}"


def wire_networks() -> str:
    """How far apart networks of workers stay over each wire."""
    rows = [
        [f"`{name}`, rounds of {budget}", f"`{wire}`", *(f"{value:.2f}" for value in row.values())]
        for network, by_wire in result("wires.json")["networks"].items()
        for name, _, budget in [network.partition(", ")]
        for wire, row in by_wire.items()
    ]
    headings = [
        "network",
        "wire",
        "noise: error, × `float32`",
        "as predicted",
        "each a way of its own",
    ]
    return table(headings, rows, "llrrr")


_CODERS = {"a core": ("", ""), "a core by torch": ("", "torch_"), "an H200": ("_cuda", "")}
"""Where coding was measured; what its result is called after `wires`, and its keys begin with."""


def _scores(task: str, epochs: int, images: int = 0) -> list[list[Any]]:
    found: dict[tuple[float, str, str, str], list[float | None]] = {}
    for line in result("wires_h200.json")["runs"]:
        run, last = line["run"], line["records"][-1]
        if (run["task"], run["epochs"], run.get("images", 0)) == (task, epochs, images):
            strategy, wire = run["strategy"], f"`{run['wire']}`"
            if note := line.get("note"):
                named = strategy == "vanilla"
                strategy = f"{strategy}, {note}" if named else strategy
                wire = wire if named else f"{wire}, {note}"
            key = (run["bytes"], strategy, wire, run["momentum"])
            found.setdefault(key, []).append(last.get("test_accuracy") or last.get("test_loss"))
    return [
        [f"{share:g}", strategy, wire, momentum, _mean_and_spread(scores), len(scores)]
        for (share, strategy, wire, momentum), scores in sorted(found.items(), reverse=True)
    ]


def cifar100_long() -> str:
    """CIFAR-100 at the paper's length by whole messages, silence among them."""
    rows = []
    for line in result_lines("reproduction/cifar100_long.jsonl"):
        run, last = line["item"], line["records"][-1]
        named = run["strategy"] in ("allreduce", "silent")
        foreseen = last["predicted_consensus"] / last["consensus_distance"] if not named else None
        rows.append(
            [
                run["strategy"] if named else f"{run['strategy']} {run['budget']:g}",
                f"{last['comm_units'] / last['iteration']:.2f}",
                f"{last['megabytes_sent'] / 1e3:.0f}",
                f"{100 * last['test_accuracy']:.1f} %",
                f"{last['train_loss']:.3f}",
                "–" if foreseen is None else f"{foreseen:.2f}",
            ]
        )
    headings = [
        "strategy",
        "units per iteration (vanilla: 5)",
        "GB sent per worker",
        "test accuracy",
        "training loss",
        "consensus, forecast / measured",
    ]
    return table(headings, rows, "lrrrrr")


def _mean_and_spread(scores: list[float | None]) -> str:
    ended = [score for score in scores if score is not None]
    if len(ended) < len(scores):
        return "diverged" if not ended else f"{len(scores) - len(ended)} diverged"
    percent, digits, unit = (100, 1, " %") if ended[0] < 1 else (1, 2, "")
    spread = f" ± {percent * stdev(ended):.{digits}f}" if len(ended) > 1 else ""
    return f"{percent * fmean(ended):.{digits}f}{spread}{unit}"


def unkind() -> str:
    """What networks do to training, and what is left of it, a line each."""
    slow = {row["case"]: row for row in result("stragglers.json")["rows"]}

    def straggling(how: str) -> str:
        over = [fmean(slow[f"{pace}, {how}"]["seconds_to_target"]) for pace in ("slow", "even")]
        return f"{over[0] / over[1]:.2f}×"

    churn, racks = result("churn-kill.json"), result("racks.json")
    cnn = result("churn-kill-cnn.json")
    rates = {name: r["iterations_per_second"] for name, r in result("replan.json").items()}
    lies = result("hostile.json")["cases"]
    gain = racks[1]["measured_iteration"] / racks[0]["measured_iteration"]
    rows = [
        [
            "one of 8 workers [four times slower](slow-workers.md)",
            f"time to the target {straggling('asynchronous')} that without it, "
            f"{straggling('in step')} in step",
        ],
        [
            "a random worker of 8 [killed every 10 s](lost-workers.md), back 5 s later",
            f"trains again {churn['disturbed']['mean_return']:.1f} s after it was killed; final "
            f"loss {churn['loss_ratio']:.3f} of the undisturbed run's (logistic regression; a CNN "
            f"{cnn['loss_ratio']:.3f}, where undisturbed ones are up to "
            f"{cnn['undisturbed']['spread']:.3f} apart)",
        ],
        [
            "one of 8 workers [sends noise](trust.md#a-worker-that-sends-garbage) × 100",
            f"honest workers' accuracy {100 * lies['noise 1.0']['processes']:.0f} % with "
            f"`clip=1`, {100 * lies['noise None']['processes']:.0f} % without",
        ],
        [
            "a link becomes [ten times slower](tuning.md#a-plan-that-follows-the-network)",
            f"{rates['follows'] / rates['knew']:.0%} of the pace of a plan that knew, "
            f"{rates['stays'] / rates['knew']:.0%} without `replan`",
        ],
        [
            "two racks [share one uplink](timing.md#links-that-share-a-channel)",
            f"iterations {gain:.1f}× sooner where the plan knows",
        ],
    ]
    return table(["on real processes and sockets", "measured"], rows, "ll")


def headline() -> str:
    """Wall-clock time to the same loss of the average model on a shaped network, all of it."""
    parts = []
    for size in result("headline.json")["sizes"]:
        for by_clock, meaning in ((size, "cores shared"), (size["core_each"], "a core a host")):
            if by_clock["rows"]:
                heading = f"messages of {size['bytes'] / 1e6:.1f} MB, {meaning}"
                parts += [_headline_of(heading, by_clock["rows"]), by_clock["verdict"] + "\n"]
    return "\n".join(parts)


def headline_short() -> str:
    """The peers, and the quickest run of each of ours, for both sizes side by side."""
    sizes = [
        {row["method"]: row for row in size["rows"]} for size in result("headline.json")["sizes"]
    ]
    rows = [
        [name, *(cell for of_size in sizes for cell in _brief(of_size[name]))]
        for name in _worth_showing(sizes)
    ]
    headings = ["", *(h for s in result("headline.json")["sizes"] for h in _brief_headings(s))]
    return table(headings, rows, "l" + "rr" * len(sizes))


def _worth_showing(sizes: list[dict[str, Any]]) -> list[str]:
    """All peers; of ours vanilla, and the quickest with and without a wire for every size."""
    chosen = {name for name, row in sizes[0].items() if row["is_peer"]} | {"vanilla", "matcha 0.1"}
    for of_size in sizes:
        for wired in (True, False):
            ours = [
                row for name, row in of_size.items()
                if not row["is_peer"] and row["seconds"] and ("modulo" in name) == wired
            ]  # fmt: skip
            chosen.add(min(ours, key=lambda row: row["seconds"])["method"])
    return [name for name in sizes[0] if name in chosen]


def _brief(row: dict[str, Any]) -> list[str]:
    if row["seconds"] is None:
        return ["never", "–"]
    return [f"{row['seconds']:.1f} s", f"{row['over_ddp']:.1f}×"]


def _brief_headings(size: dict[str, Any]) -> list[str]:
    return [f"{size['bytes'] / 1e6:.0f} MB", "than DDP"]


def _headline_of(heading: str, rows: list[dict[str, Any]]) -> str:
    """One size of messages: seconds, and ratios to DDP, the best peer and the ceiling."""

    def cell(value: float | None, form: str = ".1f") -> str:
        return "–" if value is None else format(value, form)

    cells = [
        [
            r["method"],
            f"{r['iteration_ms']:.0f}",
            cell(r["iterations"], ".0f"),
            cell(r["seconds"]),
            cell(r["over_ddp"], ".2f"),
            cell(r["over_best_peer"], ".2f"),
            cell(r["over_vanilla"], ".2f"),
            cell(r["of_ceiling"], ".2f"),
        ]
        for r in rows
    ]
    headings = [
        heading, "ms per iteration", "iterations", "seconds",
        "× DDP", "× best peer", "× vanilla", "÷ ceiling",
    ]  # fmt: skip
    return table(headings, cells, "lrrrrrrr")


def headline_settings() -> str:
    """What the headline was measured on, in a sentence."""
    d = result("headline.json")
    return (
        f"{d['hosts']} real processes on `{d['topology']}`, network cards shaped to "
        f"{d['mbps']:g} Mbit/s, digits; computing padded to {d['compute_ms']:g} ms per "
        "iteration, seconds until the average model's training loss holds "
        f"{d['target_loss']:g}. × is how many times sooner; the ceiling is DDP's iterations "
        f"at the pace of silent workers. {d['cores']} cores, torch {d['torch']}.\n"
    )


def overlap() -> str:
    """Milliseconds per iteration with the exchange after, and beside, the gradient."""
    sizes = result("headline.json")["sizes"]
    of_size = [{row["method"]: row["iteration_ms"] for row in size["rows"]} for size in sizes]
    pairs = [(n.removesuffix(", overlap"), n) for n in of_size[0] if n.endswith(", overlap")]
    rows = [
        [after, *(f"{ms[name]:.0f}" for ms in of_size for name in (after, beside))]
        for after, beside in pairs
        if after in of_size[0]
    ]
    headings = [
        h for size in sizes for h in (f"{size['size']}, default", f"{size['size']}, `overlap=True`")
    ]
    return table(["", *headings], rows, "l" + "rr" * len(sizes))
