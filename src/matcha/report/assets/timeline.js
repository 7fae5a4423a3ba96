// Rounds worker by worker, and what each worker spends on talking.
const KINDS = [["compute", "computing", ""], ["exchange", "talking", ""], ["wait", "waiting", "/"]];
const timed = data.runs.map((run, i) => [run, i]).filter(([run]) => run.timeline);
const workerNames = (run) => run.network === null
  ? [...new Set(run.timeline.worker)].sort((a, b) => a - b).map(String)
  : data.networks[run.network].labels;

if (timed.length) {
  let run = (timed.find(([, i]) => i === data.winner) ?? timed.find(([r]) =>
    r.strategy === "matcha") ?? timed[0])[0];
  const starts = () => {
    const first = new Map();
    run.timeline.iteration.forEach((k, i) =>
      first.set(k, Math.min(first.get(k) ?? Infinity, run.timeline.start[i])));
    return [...first.entries()].sort((a, b) => a[0] - b[0]);
  };
  let rounds = starts();
  const WINDOW = 12;

  const range = () => {
    const from = Number($("window").value);
    const after = rounds[Math.min(from + WINDOW, rounds.length - 1)];
    const last = Math.max(...run.timeline.start.map((s, i) => s + run.timeline.length[i]));
    const end = from + WINDOW >= rounds.length ? last : after[1];
    return [rounds[from][1], end];
  };
  const draw_ = () => {
    const { worker, start, length, kind, iteration, unit } = run.timeline;
    const names = workerNames(run);
    const bars = KINDS.flatMap(([name, text, shape], number_) => {
      const mine = kind.map((k, i) => i).filter((i) => kind[i] === number_);
      if (!mine.length) return [];
      return [{ type: "bar", orientation: "h", name: text, y: mine.map((i) => worker[i]),
        base: mine.map((i) => start[i]), x: mine.map((i) => length[i]),
        customdata: mine.map((i) => [names[worker[i]], iteration[i], length[i]]),
        marker: { color: css(`--${name}`), line: { width: 0.5, color: css("--bg") },
          pattern: { shape, fillmode: "overlay", size: 5, solidity: 0.25, fgcolor: css("--ink"),
            fgopacity: 0.55 } },
        hovertemplate: `<b>worker %{customdata[0]}</b>, round %{customdata[1]}<br>${text} ` +
          `%{customdata[2]:.4g} ${unit}<extra></extra>` }];
    });
    const many = names.length > 24;
    $("chart-timeline").style.height = `${Math.max(190, 70 + names.length * (many ? 11 : 27))}px`;
    return { traces: bars, layout: layoutOf(
      axis(unit === "units" ? "units of communication time" : "seconds", { range: range() }),
      axis("worker", { autorange: "reversed", tickmode: "array", tickvals: names.map((_, i) => i)
        .filter((i) => !many || i % 4 === 0), ticktext: names.filter((_, i) => !many || i % 4 === 0),
      showgrid: false, fixedrange: true }),
      { barmode: "overlay", bargap: many ? 0.1 : 0.25 }) };
  };
  const choose = () => {
    rounds = starts();
    $("window").max = Math.max(0, rounds.length - WINDOW);
    $("window").value = 0;
    const { planned, unit } = run.timeline;
    $("timeline-note").textContent = planned
      ? `No spans were recorded for this run, so this is the plan's schedule, in ${unit}: communication only.`
      : `The first ${rounds.length} rounds of the run as recorded; gaps are idle time, and evaluations, which the clock does not count, are left out. Drag to zoom, double-click to reset.`;
    say();
  };
  const say = () => {
    const from = rounds[Number($("window").value)][0];
    $("window-value").textContent = from;
    $("window").setAttribute("aria-valuetext", `round ${from}`);
  };
  timed.forEach(([r, i]) => $("timeline-run").append(new Option(r.label, i, false, r === run)));
  $("timeline-run").addEventListener("change", () => {
    run = data.runs[Number($("timeline-run").value)];
    choose();
    draw("chart-timeline");
  });
  $("window").addEventListener("input", () => {
    say();
    if ($("chart-timeline").dataset.drawn) Plotly.relayout($("chart-timeline"), { "xaxis.range": range() });
  });
  for (const [name, text, shape] of KINDS) {
    const key = element("svg", { viewBox: "0 0 34 12", "aria-hidden": "true" });
    key.append(element("rect", { width: 34, height: 12, fill: `var(--${name})` }));
    if (shape === "/") for (const x of [4, 12, 20, 28]) key.append(element("line",
      { x1: x, y1: 12, x2: x + 6, y2: 0, stroke: "var(--ink)", "stroke-width": 1.3 }));
    $("kinds").append(element("li", {}, key, text));
  }
  choose();
  chart("chart-timeline", draw_);
  dataTables.timeline = () => ({
    head: ["worker", "round", "doing", "from", "for"],
    rows: run.timeline.worker.map((w, i) => [workerNames(run)[w], run.timeline.iteration[i],
      KINDS[run.timeline.kind[i]][1], run.timeline.start[i], run.timeline.length[i]]),
  });
}

const loaded = ["planned", "measured"].filter((kind) => data.runs.some((run) => run.loads[kind]));
if (loaded.length) {
  let kind = loaded[0];
  const unit = () => kind === "measured" ? "seconds" : data.runs.find((r) => r.loads.planned).unit;
  const labels = (run) => run.network === null ? run.loads[kind].map((_, i) => String(i))
    : data.networks[run.network].labels;
  const PATTERNS = ["", "/", ".", "x", "-", "|", "+", "\\", "", "/", ".", "x"];
  segments("load-kind", loaded.map((k) => [k, k === "planned" ? "planned" : "measured"]), kind,
    (chosen) => { kind = chosen; draw("chart-loads"); });
  const loadChart = () => ({
    traces: data.runs.flatMap((run, i) => !shown[i] || !run.loads[kind] ? [] : [{
      type: "bar", name: run.label, x: labels(run).map((_, w) => w), y: run.loads[kind],
      customdata: labels(run), marker: { color: css(`--s${run.style}`), pattern: {
        shape: PATTERNS[run.style], fillmode: "overlay", size: 7, solidity: 0.2, fgcolor: css("--bg") } },
      hovertemplate: `<b>${escaped(run.label)}</b>, worker %{customdata}<br>%{y:.4g} ${unit()} ` +
        "per iteration<extra></extra>" }]),
    layout: layoutOf(axis("worker", { tickmode: "array", showgrid: false,
      tickvals: labels(data.runs[0]).map((_, w) => w), ticktext: labels(data.runs[0]) }),
    axis(`${unit()} per iteration`, { rangemode: "tozero" }), { barmode: "group", bargap: 0.25 }),
  });
  chart("chart-loads", () => {
    listKeys("chart-loads", data.runs.flatMap((run, i) =>
      shown[i] && run.loads[kind] ? [[barKey(run.style), run.label]] : []));
    return loadChart();
  });
  dataTables.loads = () => ({
    head: ["worker", ...data.runs.map((run) => run.label)],
    rows: labels(data.runs.find((r) => r.loads[kind])).map((name, w) =>
      [name, ...data.runs.map((run) => run.loads[kind]?.[w])]),
  });
}
dataTables.results = () => {
  const rows = [...document.querySelectorAll("table.results tr")].map((row) =>
    [...row.children].map((cell) => cell.dataset.value ?? cell.firstChild?.textContent ?? ""));
  return { head: rows[0] ?? [], rows: rows.slice(1) };
};
$("results-csv").addEventListener("click", () => saveTable("results"));
addTools();
// The charts of the first screen now; the rest as soon as they are painted.
for (const id of ["chart-time", "chart-epoch"]) if (charts.has(id)) draw(id);
setTimeout(drawNext, 0);
document.documentElement.dataset.ready = "yes";
