// A run that grows: which links meet, who is there, and curves as they come.
const live = { run: null, links: [], iteration: 0, meetings: [], megabytes: [], failures: 0 };
const reader = Math.random().toString(36).slice(2);
const ask = async (path, more = {}) => {
  const query = new URLSearchParams({ ...Object.fromEntries(new URLSearchParams(location.search)), reader });
  for (const [key, value] of Object.entries(more)) query.set(key, value);
  const answer = await fetch(`${path}?${query}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.json();
};
const put = (id, text) => { if ($(id).textContent !== text) $(id).textContent = text; };
const liveNet = () => data.networks[data.runs[live.run]?.network];
const liveName = (e) => liveNet().links[e].map((i) => liveNet().labels[i]).join(" – ");
const describeTraffic = (e) => `Link ${liveName(e)}: ${live.meetings[e] ?? 0} meetings, ` +
  `${number(live.megabytes[e] ?? 0)} megabytes`;

const openRun = (run) => {
  live.run = run;
  const net = liveNet();
  live.links = net?.positions ? drawNetwork(net, (e) => {
    if (e !== null) $("live-numbers").textContent = describeTraffic(e);
  }, "live-graph") : [];
  live.links.forEach((link, e) => {
    link.box.remove();
    link.line.setAttribute("stroke", "var(--soft)");
    link.group.setAttribute("aria-label", describeTraffic(e));
  });
  if (!live.links.length) $("live-graph").textContent = "Too many links to draw.";
};

const showTraffic = () => {
  const most = Math.max(...live.megabytes, 1e-12);
  live.links.forEach((link, e) => {
    link.line.setAttribute("stroke-width", (1 + 6 * (live.megabytes[e] ?? 0) / most).toFixed(2));
    link.group.setAttribute("aria-label", describeTraffic(e));
  });
  if ($("chart-live").dataset.drawn) draw("chart-live");
  const table = document.querySelector("details[data-table=traffic]");
  if (table.open) fillTable(table);
};

// The rounds since the last answer, one after another until the next.
const POLL = 500;
const light = (rounds) => {
  const step = POLL / Math.max(rounds.length, 1);
  rounds.forEach((round, n) => setTimeout(() => live.links.forEach((link, e) =>
    link.group.classList.toggle("lit", round.includes(e))), n * step));
  if (!rounds.length) live.links.forEach((link) => link.group.classList.remove("lit"));
};
const showMembers = (members) => {
  const net = liveNet();
  const there = new Set(members);
  const count = net ? net.labels.length : data.runs[live.run].workers;
  put("live-members", `${there.size} of ${count}`);
  document.querySelectorAll("#live-graph .node").forEach((node, i) =>
    node.classList.toggle("away", !there.has(i)));
  live.links.forEach((link, e) => link.group.classList.toggle("away",
    net.links[e].some((i) => !there.has(i))));
};

const again = () => {
  const query = new URLSearchParams(location.search);
  query.set("reader", reader);
  location.replace(`/?${query}`);
};
const alike = (runs) => runs.length === data.runs.length && runs.every((run, i) =>
  run.label === data.runs[i].label && !run.presence === !data.runs[i].presence &&
  String(Object.keys(run.curves)) === String(Object.keys(data.runs[i].curves)));
const take = async () => {
  const fresh = await ask("/data");
  if (!alike(fresh.runs)) return again();  // a first record, or another run: other charts
  data.live.version = fresh.version;
  fresh.runs.forEach((run, i) => Object.assign(data.runs[i], run));
  redraw();
  document.querySelectorAll("details.data[open]").forEach(fillTable);
  put("live-status", `Epoch ${number(live.epoch)}${live.epochs ? ` of ${live.epochs}` : ""} is recorded. ` +
    "This page becomes the report when the run ends.");
  return undefined;
};

const poll = async () => {
  try {
    const now = await ask("/now", { since: live.iteration });
    live.failures = 0;
    if (now.over) { again(); return; }
    if (now.run !== undefined) {
      if (now.run !== live.run) openRun(now.run);
      Object.assign(live, { epoch: now.epoch, epochs: now.epochs });
      put("live-epoch", `${number(now.epoch)}${now.epochs ? ` of ${now.epochs}` : ""}`);
      put("live-iteration", now.iteration.toLocaleString("en"));
      put("live-pace-title", now.clock === "wall" ? "iterations per second" : "iterations per simulated second");
      put("live-pace", number(now.pace, 3));
      showMembers(now.members);
      light(now.rounds ?? []);
      if (now.meetings && String(now.meetings) !== String(live.meetings)) {
        Object.assign(live, { meetings: now.meetings, megabytes: now.megabytes });
        showTraffic();
      }
      live.iteration = now.iteration;
      document.documentElement.dataset.live = String(now.iteration);
    }
    if (now.version !== data.live.version) await take();
  } catch (error) {
    live.failures += 1;
    if (live.failures === 6) {
      put("live-status", "The run does not answer any more: it was stopped. What it recorded is in its folder.");
      return;
    }
  }
  setTimeout(poll, POLL);
};

chart("chart-live", () => ({
  traces: [{ type: "bar", x: live.megabytes.map((_, e) => liveName(e)), y: live.megabytes,
    marker: { color: css("--exchange") }, hovertemplate: "%{x}<br>%{y:.4g} megabytes<extra></extra>" }],
  layout: layoutOf(axis("link", { type: "category", showticklabels: live.megabytes.length <= 24 }),
    axis("megabytes", { rangemode: "tozero" })),
}));
dataTables.traffic = () => ({
  head: ["link", "meetings", "megabytes"],
  rows: live.meetings.map((count, e) => [liveName(e), count, live.megabytes[e]]),
});
poll();
