// Which workers were there when: a bar a stretch, gaps where a worker was away.
const visited = data.runs.map((run, i) => [run, i]).filter(([run]) => run.presence);

if (visited.length) {
  let run = (visited.find(([, i]) => i === data.winner) ?? visited[0])[0];
  const names = () => run.network === null
    ? Array.from({ length: run.workers }, (_, i) => String(i)) : data.networks[run.network].labels;
  const there = () => {
    const { worker, start, stop, iterations } = run.presence;
    return names().flatMap((_, w) => {
      const stretches = [];
      let from = 0;
      worker.forEach((who, i) => {
        if (who !== w) return;
        if (start[i] > from) stretches.push([w, from, start[i]]);
        from = stop[i] ?? iterations;
      });
      if (from < iterations) stretches.push([w, from, iterations]);
      return stretches;
    });
  };
  const drawPresence = () => {
    const bars = there(), labels = names(), many = labels.length > 24;
    $("chart-presence").style.height = `${Math.max(190, 70 + labels.length * (many ? 11 : 27))}px`;
    const ticks = labels.map((_, i) => i).filter((i) => !many || i % 4 === 0);
    return { traces: [{ type: "bar", orientation: "h", name: "there", y: bars.map((b) => b[0]),
      base: bars.map((b) => b[1]), x: bars.map((b) => b[2] - b[1]),
      customdata: bars.map((b) => [labels[b[0]], b[1], b[2]]),
      marker: { color: css("--exchange"), line: { width: 0.5, color: css("--bg") } },
      hovertemplate: "<b>worker %{customdata[0]}</b> was there<br>from iteration " +
        "%{customdata[1]} to %{customdata[2]}<extra></extra>" }],
    layout: layoutOf(axis("iterations", { range: [0, run.presence.iterations] }),
      axis("worker", { autorange: "reversed", tickmode: "array", tickvals: ticks,
        ticktext: ticks.map((i) => labels[i]), showgrid: false, fixedrange: true }),
      { barmode: "overlay", bargap: many ? 0.1 : 0.25 }) };
  };
  const sayPresence = () => {
    const { worker } = run.presence;
    const who = [...new Set(worker)].length;
    $("presence-note").textContent = `${who} of ${names().length} workers were away at some time, ` +
      `${worker.length} time${worker.length === 1 ? "" : "s"} in all; gaps are iterations without them, ` +
      "as the others learnt it.";
  };
  visited.forEach(([r, i]) => $("presence-run").append(new Option(r.label, i, false, r === run)));
  $("presence-run").addEventListener("change", () => {
    run = data.runs[Number($("presence-run").value)];
    sayPresence();
    draw("chart-presence");
  });
  sayPresence();
  chart("chart-presence", drawPresence);
  dataTables.presence = () => ({
    head: ["worker", "away from iteration", "back at iteration"],
    rows: run.presence.worker.map((w, i) => [names()[w], run.presence.start[i],
      run.presence.stop[i] ?? "never"]),
  });
}
