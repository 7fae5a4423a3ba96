// Loss against epochs and time, consensus distance beside its prediction.
const losses = ["train_loss", "test_loss", "worker_loss", "test_accuracy", "gradient_norm"].filter((metric) =>
  data.runs.some((run) => run.curves[metric]));
let metric = losses.includes(data.objective) ? data.objective : losses[0];

// Several seeds: the band from a deviation below the mean to one above.
const bandTraces = (name, x) => data.runs.flatMap((run, i) => {
  const curve = run.curves[name];
  if (!curve?.low || !shown[i]) return [];
  const edge = { type: "scatter", mode: "lines", x: curve[x], line: { width: 0 }, hoverinfo: "skip",
    showlegend: false, diverged: run.diverged };
  return [{ ...edge, y: curve.low, name: `${run.label}, low` },
    { ...edge, y: curve.high, name: `${run.label}, high`, fill: "tonexty",
      fillcolor: `${css(`--s${run.style}`)}33` }];
});
const curveTraces = (name, x) => data.runs.flatMap((run, i) => {
  const curve = run.curves[name];
  if (!curve || !shown[i]) return [];
  return [{
    type: "scatter", mode: "lines+markers", name: run.label, x: curve[x], y: curve.y,
    diverged: run.diverged,
    line: lineOf(run.style),
    marker: { symbol: SYMBOLS[run.style], size: sparse(curve.y.length, run.style),
      color: css(`--s${run.style}`), line: { width: 0 } },
    hovertemplate: `<b>${escaped(run.label)}</b><br>${NAMES[name]} %{y:.4g}<br>` +
      `%{x:.4g} ${NAMES[x]}<extra></extra>`,
  }];
});
// What theory says of a metric, in thin lines beside it.
const thinTraces = (name, x, word) => data.runs.flatMap((run, i) => {
  const curve = run.curves[name];
  if (!curve || !shown[i]) return [];
  return [{ type: "scatter", mode: "lines", name: `${run.label}, ${word}`, diverged: run.diverged,
    x: curve[x], y: curve.y, opacity: 0.85,
    line: { color: css(`--s${run.style}`), width: 1.2, dash: "solid" },
    hovertemplate: `<b>${escaped(run.label)}</b>, ${word}<br>%{y:.4g} at %{x:.4g} ${NAMES[x]}` +
      "<extra></extra>" }];
});
const bounds = (x) =>
  metric === "gradient_norm" ? thinTraces("gradient_bound", x, "Theorem 2's bound") : [];
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");

const targetShapes = () => metric !== data.objective || data.target === null ? {} : {
  shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: data.target, y1: data.target,
    line: { color: css("--soft"), width: 1, dash: "dot" } }],
  // In the margin, where no curve can run through it.
  annotations: [{ xref: "paper", x: 1, y: $("log").checked ? Math.log10(data.target) : data.target,
    text: `target<br>${number(data.target)}`, showarrow: false, xanchor: "left", yanchor: "middle",
    align: "left", font: { size: 11.5, color: css("--soft") } }],
  margin: { l: 56, r: 58, t: 10, b: 46 },
};
const hits = (x) => metric !== data.objective ? [] : data.runs.flatMap((run, i) =>
  !shown[i] || run.hit?.[x] === undefined ? [] : [{
    type: "scatter", mode: "markers", x: [run.hit[x]], y: [run.hit.y], name: run.label,
    diverged: run.diverged,
    marker: { symbol: "circle-open", size: 13, line: { width: 2.5 }, color: css(`--s${run.style}`) },
    hovertemplate: `<b>${escaped(run.label)}</b><br>reached the target<br>` +
      `%{x:.4g} ${NAMES[x]}<extra></extra>`,
  }]);

// What never reached the target would squash those who did: the axis ends a little after the last.
const decided = (x) => {
  const last = Math.max(0, ...data.runs.map((run, i) => (shown[i] && run.hit?.[x]) || 0));
  const longest = Math.max(...data.runs.flatMap((run, i) => shown[i] && run.curves[metric]?.[x] || []));
  return metric === data.objective && last && longest > 2 * last ? { range: [0, 1.5 * last] } : {};
};
const lossChart = (x) => () => {
  const traces = [...bandTraces(metric, x), ...bounds(x), ...curveTraces(metric, x), ...hits(x)];
  // Wires differ by orders of magnitude; who sends nothing has no place there.
  const across = x === "megabytes_sent"
    ? axis("megabytes sent by a worker, in the mean", { type: "log", dtick: 1 })
    : axis(NAMES[x], { rangemode: "tozero", ...decided(x) });
  return { traces: $("log").checked ? withoutZeros(traces) : traces, layout: layoutOf(across,
    valueAxis(NAMES[metric], traces, $("log").checked), targetShapes()) };
};

const curveTable = (name, x) => () => ({
  head: ["run", NAMES[x], NAMES[name]],
  rows: data.runs.flatMap((run) => (run.curves[name]?.y ?? []).map((y, i) =>
    [run.label, run.curves[name][x][i], y])),
});

if (losses.length) {
  for (const name of losses) $("metric").append(new Option(NAMES[name], name, false, name === metric));
  $("metric").addEventListener("change", () => {
    metric = $("metric").value;
    $("log").checked = metric !== "test_accuracy";
    redraw();
  });
  $("log").addEventListener("change", redraw);
  data.runs.forEach((run, i) => {
    const box = element("input", { type: "checkbox", id: `run-${i}` });
    box.checked = true;
    box.addEventListener("change", () => { shown[i] = box.checked; redraw(); });
    $("legend").append(element("label", {}, box, swatch(run.style), run.label));
  });
  if (data.target !== null) {
    $("curves-note").textContent = "Circles mark where a run reached the target and stayed there at the next evaluation." +
      (data.runs.some((run) => run.seeds > 1) ? " Bands are one standard deviation over seeds." : "") +
      (decided("time").range || decided("epoch").range ? " Double-click shows runs to their end." : "");
  }
  for (const x of ["time", "epoch", ...($("bytes").hidden ? [] : ["megabytes_sent"])]) {
    chart(`chart-${x}`, lossChart(x));
    dataTables[x] = () => curveTable(metric, x)();
  }
}

if (data.runs.some((run) => run.curves.consensus_distance)) {
  const predicted = data.runs.some((run) => run.curves.predicted_consensus);
  $("prediction-note").textContent = predicted
    ? "Thick lines are what happened; thin ones a forecast from the plan and the spread of the steps, " +
      "within a factor of three in four of five runs on digits, 19 at worst, not measured elsewhere." : "";
  chart("chart-consensus", () => {
    listKeys("chart-consensus", data.runs.flatMap((run, i) =>
      shown[i] && run.curves.consensus_distance ? [[swatch(run.style), run.label]] : []));
    const traces = [...bandTraces("consensus_distance", "iteration"),
      ...thinTraces("predicted_consensus", "iteration", "predicted"),
      ...curveTraces("consensus_distance", "iteration")];
    return { traces: withoutZeros(traces), layout: layoutOf(axis("iterations", { rangemode: "tozero" }),
      valueAxis("consensus distance", traces, true)) };
  });
  dataTables.consensus = () => ({
    head: ["run", "iteration", "consensus distance", "predicted"],
    rows: data.runs.flatMap((run) => {
      const seen = run.curves.consensus_distance;
      const told = run.curves.predicted_consensus;
      const at = new Map(told?.iteration.map((k, i) => [k, told.y[i]]));
      return (seen?.y ?? []).map((y, i) => [run.label, seen.iteration[i], y, at.get(seen.iteration[i])]);
    }),
  });
}
