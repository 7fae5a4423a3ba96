// The slider: activation, rho, consensus error and time move together over the sweep.
const explorer = { net: null, links: [], stop: 0, strategy: null };

// A strategy that was not planned at a stop shows its plan at the nearest one, with its budget.
const pointOf = (name) => {
  const points = explorer.net.strategies[name];
  if (points.length === 1) return points[0];
  const distance = (i) => Math.abs(explorer.net.budgets[i] - explorer.net.budgets[explorer.stop]);
  const known = points.map((_, i) => i).filter((i) => points[i]);
  return points[known.reduce((best, i) => (distance(i) < distance(best) ? i : best))];
};
// As its run looks; one that stands for several runs over a wire takes a spare look.
const styleOf = (name) => {
  const run = data.runs.find((one) => one.label === name);
  const place = data.strategies.indexOf(name);
  if (run || place >= 0) return run?.style ?? place;
  return data.styles.length - 1 - Object.keys(explorer.net.strategies).indexOf(name) % 7;
};

const describeLink = (e) => {
  const { net, strategy } = explorer;
  const [i, j] = net.links[e];
  const point = pointOf(strategy);
  const matching = point.matching
    ? `, matching ${matchingName(point.matching[e])}` : "";
  const seconds = net.link_seconds ? `, ${number(net.link_seconds[e])} s per exchange` : "";
  const often = point.activation[e] <= 1
    ? `active in ${percent(point.activation[e])} of iterations`
    : `${number(point.activation[e], 3)} exchanges per iteration`;
  return `Link ${net.labels[i]} – ${net.labels[j]}${matching}: ${often}${seconds}`;
};

// Push-sum: where messages do not come round, workers weigh differently.
const describeShares = (omega) => {
  const each = omega.length <= 20
    ? omega.map((share, i) => `${explorer.net.labels[i]}: ${number(share, 3)}`).join(", ")
    : `${number(Math.min(...omega), 3)} to ${number(Math.max(...omega), 3)}`;
  return `Push-sum weights ω of the workers, on average over a cycle: ${each}.`;
};

const showLink = (e, group) => {
  $("tip").hidden = e === null;
  if (e === null) return;
  $("link-numbers").textContent = describeLink(e);
  $("tip").textContent = describeLink(e);
  const box = group.querySelector(".hit").getBoundingClientRect();
  const left = Math.min(box.left + box.width / 2 + 10, innerWidth - $("tip").offsetWidth - 8);
  $("tip").style.left = `${Math.max(8, left)}px`;
  $("tip").style.top = `${Math.max(8, box.top + box.height / 2 - $("tip").offsetHeight - 12)}px`;
};

const update = () => {
  const { net, strategy, stop } = explorer;
  const budget = net.budgets[stop];
  const point = pointOf(strategy);
  $("budget-value").textContent = number(budget);
  $("budget").setAttribute("aria-valuetext", `budget ${number(budget)}`);
  $("rho").textContent = number(point.rho);
  $("rho-title").textContent = point.rho_kind === "cycle" ? "ρ, mean over a cycle" : "ρ, one step";
  $("error").textContent = number(point.error);
  $("comm").textContent = number(point.time);
  $("omega").hidden = !point.omega;
  $("omega").textContent = point.omega ? describeShares(point.omega) : "";
  $("share").textContent = net.vanilla_time ? percent(point.time / net.vanilla_time) : "–";
  if (explorer.links.length) {
    styleLinks(explorer.links, point, `var(--s${styleOf(strategy)})`, describeLink);
    listMatchings(point);
  }
  $("side-by-side").tBodies[0].replaceChildren(...Object.keys(net.strategies).map((name) => {
    const p = pointOf(name);
    const title = element("th", { scope: "row" }, swatch(styleOf(name)), ` ${name}`);
    const row = element("tr", name === strategy ? { class: "chosen" } : {}, title,
      ...[p.budget, p.error, p.time].map((v) => element("td", {}, v === null ? "–" : number(v))),
      element("td", {}, number(p.rho), element("span", { class: "kind" },
        p.rho_kind === "cycle" ? " cycle" : " step")));
    row.dataset.strategy = name;
    return row;
  }));
  moveCursor(budget);
  document.querySelectorAll("#explorer details[open]").forEach(fillTable);
};

const listMatchings = (point) => {
  if (!point.activation.some((often) => often > 0)) {
    $("matchings").replaceChildren(element("li", {}, point.averages
      ? "This strategy averages over all workers at once: it has no links of its own."
      : "This strategy uses no link."));
    return;
  }
  if (!point.matching) {
    $("matchings").replaceChildren(element("li", {},
      "This strategy picks matchings that overlap: a link has a share of its own, no colour."));
    return;
  }
  const used = [...new Set(point.matching)].filter((j) => j >= 0).sort((a, b) => a - b);
  $("matchings").replaceChildren(...used.map((j) => {
    const key = element("svg", { viewBox: "0 0 34 12", "aria-hidden": "true" });
    key.append(element("line", { x1: 0, y1: 6, x2: 34, y2: 6, stroke: matchingColor(j),
      "stroke-width": 4, "stroke-dasharray": matchingDash(j) }));
    return element("li", {}, key, `${matchingName(j)}: ${percent(point.probabilities[j])}`);
  }));
};

const sweepTraces = (key) => Object.entries(explorer.net.strategies).map(([name, points]) => {
  const flat = points.length === 1;
  const style = styleOf(name);
  return { type: "scatter", mode: flat ? "lines" : "lines+markers", name, line: lineOf(style),
    x: flat ? [0, 1] : explorer.net.budgets, y: flat ? [points[0][key], points[0][key]]
      : points.map((p) => (p ? p[key] : null)),
    connectgaps: true, marker: { symbol: SYMBOLS[style], size: 5.5, color: css(`--s${style}`) },
    hovertemplate: `<b>${name}</b> at %{x}<br>%{y:.4g}<extra></extra>` };
});
const cursor = (budget) => [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: budget, x1: budget,
  line: { color: css("--accent"), width: 2 } }];
const sweepChart = (key, logarithmic) => () => {
  const traces = sweepTraces(key);
  listKeys(`chart-${key}`, Object.keys(explorer.net.strategies).map((name) =>
    [swatch(styleOf(name)), name]));
  return { traces: logarithmic ? withoutZeros(traces) : traces, layout: layoutOf(axis("budget C<sub>b</sub>", { range: [0, 1.02] }),
    valueAxis("", traces, logarithmic), { margin: { l: 48, r: 10, t: 6, b: 40 },
      shapes: cursor(explorer.net.budgets[explorer.stop]) }) };
};
const moveCursor = (budget) => ["chart-rho", "chart-error"].forEach((id) =>
  $(id).dataset.drawn && Plotly.relayout($(id), { shapes: cursor(budget) }));

const showNetwork = (index) => {
  const net = data.networks[index];
  explorer.net = net;
  explorer.strategy = net.start.strategy;
  explorer.stop = net.budgets.indexOf(net.start.budget);
  $("budget").max = net.budgets.length - 1;
  $("budget").disabled = net.budgets.length < 2;
  $("budget").value = explorer.stop;
  $("comm-title").textContent = `${net.unit} per iteration`;
  $("side-unit").textContent = net.unit === "units" ? "units/iteration" : "s/iteration";
  if (net.positions) explorer.links = drawNetwork(net, showLink);
  else {
    explorer.links = [];
    $("graph").replaceChildren(element("p", { class: "note" },
      `${net.labels.length} workers and ${net.num_links} links are too many to draw.`));
    $("link-numbers").hidden = true;
  }
  segments("strategy", Object.keys(net.strategies).map((name) => [name, name]), net.start.strategy,
    (name) => { explorer.strategy = name; update(); });
  update();
  // At one budget there is nothing to see by budget.
  for (const id of ["chart-error", "chart-rho"]) $(id).closest("figure").hidden = net.budgets.length < 2;
  chart("chart-error", sweepChart("error", true));
  chart("chart-rho", sweepChart("rho", false));
};

if (data.networks.length) {
  data.networks.forEach((net, i) => $("network").append(new Option(net.name, i)));
  $("network-label").hidden = data.networks.length < 2;
  $("network").addEventListener("change", () => showNetwork(Number($("network").value)));
  $("budget").addEventListener("input", () => { explorer.stop = Number($("budget").value); update(); });
  showNetwork(0);
  dataTables.sweep = () => ({
    head: ["strategy", "budget", "consensus error", explorer.net.unit, "rho"],
    rows: Object.entries(explorer.net.strategies).flatMap(([name, points]) =>
      points.filter((p) => p).map((p) => [name, p.budget, p.error, p.time, p.rho])),
  });
  dataTables.links = () => ({
    head: ["link", "matching", "exchanges per iteration", "width"],
    rows: explorer.net.links.map(([i, j], e) => {
      const point = pointOf(explorer.strategy);
      return [`${explorer.net.labels[i]} – ${explorer.net.labels[j]}`,
        point.matching ? matchingName(point.matching[e]) : "–", point.activation[e],
        linkWidth(point.activation[e], explorer.net.links.length)];
    }),
  });
}
