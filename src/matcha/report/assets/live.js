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
};

// Charts of what the run records; the workers that train may share this processor. So only those in
// sight are drawn, when they have something new, and so seldom that it takes a small share of time.
const POLL = 1000, SHARE = 0.004;
const growing = ["chart-time", "chart-epoch", "chart-megabytes_sent", "chart-consensus",
  "chart-presence"];
const stale = new Set();
let due = 0;
const inSight = (id) => {
  const box = $(id)?.getBoundingClientRect();
  return box && box.width > 0 && box.bottom > 0 && box.top < innerHeight;
};
const drawStale = () => {
  const ids = [...stale].filter((id) => charts.has(id) && inSight(id));
  if (document.hidden || !ids.length || performance.now() < due) return;
  due = Infinity;
  requestAnimationFrame((began) => {
    for (const id of ids) { stale.delete(id); draw(id); }
    // What a drawing causes is done in the next frame, too.
    requestAnimationFrame(() => { due = performance.now() + (performance.now() - began) / SHARE; });
  });
};
addEventListener("scrollend", () => { if (due < Infinity) due = 0; drawStale(); });

// The last round before the answer.
const light = (rounds) => {
  const last = rounds[rounds.length - 1] ?? [];
  live.links.forEach((link, e) => link.group.classList.toggle("lit", last.includes(e)));
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
  const fresh = await ask("/data", { version: data.live.version });
  // null: as it was
  const runs = fresh.runs.map((run, i) => run ?? data.runs[i]);
  if (!alike(runs)) return again();  // a first record, or another run: other charts
  data.live.version = fresh.version;
  runs.forEach((run, i) => Object.assign(data.runs[i], run));
  growing.forEach((id) => stale.add(id));
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
        stale.add("chart-live");
      }
      live.iteration = now.iteration;
      document.documentElement.dataset.live = String(now.iteration);
    }
    if (now.version !== data.live.version) await take();
    drawStale();
  } catch (error) {
    live.failures += 1;
    if (live.failures === 6) {
      put("live-status", "The run does not answer any more: it was stopped. What it recorded is in its folder.");
      return;
    }
  }
  setTimeout(poll, document.hidden ? 5 * POLL : POLL);
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
