// One way to draw a chart with plotly, again whenever the theme or the choice of runs changes.
const charts = new Map();
const shown = data.runs.map(() => true);

const axis = (title, more = {}) => ({
  title: { text: title, standoff: 8 }, gridcolor: css("--grid"), linecolor: css("--line"),
  zeroline: false, automargin: true, fixedrange: false, ...more,
});

// Ticks at 1, 2 and 5 of each decade in view, or at decades only when there are many.
const logTicks = (traces) => {
  const values = traces.flatMap((trace) => trace.y).filter((v) => v > 0);
  if (!values.length) return {};
  const [low, high] = [Math.min(...values), Math.max(...values)].map(Math.log10);
  const steps = high - low > 3 ? [1] : high - low > 1 ? [1, 3] : [1, 2, 3, 5, 7];
  const ticks = [];
  for (let decade = Math.floor(low) - 1; decade <= Math.ceil(high); decade += 1) {
    for (const step of steps) ticks.push(step * 10 ** decade);
  }
  return { tickmode: "array", tickvals: ticks, ticktext: ticks.map((v) => number(v, 2)) };
};
const valueAxis = (title, traces, logarithmic) => logarithmic
  ? axis(title, { type: "log", ...logTicks(traces) }) : axis(title);

const layoutOf = (x, y, more = {}) => ({
  margin: { l: 56, r: 14, t: 10, b: 46 }, showlegend: false, dragmode: "zoom",
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
    size: 12.5, color: css("--soft") },
  hoverlabel: { bgcolor: css("--bg"), bordercolor: css("--line"), font: { color: css("--ink") } },
  xaxis: x, yaxis: y, hovermode: "closest", ...more,
});

const draw = (id) => {
  const { traces, layout } = charts.get(id)();
  Plotly.react($(id), traces, layout, { displayModeBar: false, responsive: true });
  $(id).dataset.drawn = "yes";
};

// Charts below the fold wait until they are near, so that the page opens at once.
const near = new IntersectionObserver((entries) => entries.forEach((entry) => {
  if (!entry.isIntersecting) return;
  near.unobserve(entry.target);
  draw(entry.target.id);
}), { rootMargin: "300px" });

const chart = (id, make) => {
  charts.set(id, make);
  if ($(id).dataset.drawn) draw(id); else near.observe($(id));
};
const redraw = () => charts.forEach((_, id) => $(id).dataset.drawn && draw(id));
const drawAll = () => charts.forEach((_, id) => draw(id));

const lineOf = (style, color = css(`--s${style}`)) => ({ color, width: 2.2,
  dash: DASHES[LINE_DASH[style]] });

// Markers on a few points only: enough to tell lines apart without colour.
const sparse = (count, style) => {
  const every = Math.max(1, Math.ceil(count / 9));
  return Array.from({ length: count }, (_, i) => (i + 2 * style) % every === 0 ? 7 : 0);
};

// -- the theme: the reader's setting, or the button's
const preferred = matchMedia("(prefers-color-scheme: dark)");
const setTheme = (name) => {
  document.documentElement.dataset.theme = name;
  redraw();
};
document.documentElement.dataset.theme = preferred.matches ? "dark" : "light";
preferred.addEventListener("change", () => setTheme(preferred.matches ? "dark" : "light"));
$("theme").addEventListener("click", () =>
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

// -- paper is white: print in the light theme, with every chart drawn
let before = null;
addEventListener("beforeprint", () => {
  before = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  document.querySelectorAll("#again details").forEach((details) => { details.open = true; });
  drawAll();
});
addEventListener("afterprint", () => before && setTheme(before));
