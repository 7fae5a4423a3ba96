// One way to draw a chart with plotly, again whenever the theme or the choice of runs changes.
const charts = new Map();
const shown = data.runs.map(() => true);

const axis = (title, more = {}) => ({
  title: { text: title, standoff: 8 }, gridcolor: css("--grid"), linecolor: css("--line"),
  zeroline: false, automargin: true, fixedrange: false, ...more,
});

// A log axis over less than a decade gets round numbers; beyond that, powers of ten.
const logTicks = (traces) => {
  const values = traces.flatMap((trace) => trace.y).filter((v) => v > 0);
  if (!values.length) return {};
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const decades = Math.log10(high / low);
  const ticks = [];
  if (decades < 0.8) {
    const rough = Math.max(high - low, high * 0.02) / 4;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((m) => m * unit >= rough);
    for (let k = Math.floor(low / step) - 1; k * step <= high + step; k += 1) {
      if (k > 0) ticks.push(k * step);
    }
  } else {
    const steps = decades > 3 ? [1] : [1, 3];
    for (let d = Math.floor(Math.log10(low)) - 1; d <= Math.ceil(Math.log10(high)); d += 1) {
      ticks.push(...steps.map((step) => step * 10 ** d));
    }
  }
  return { tickmode: "array", tickvals: ticks, ticktext: ticks.map(tickText) };
};
const tickText = (value) => {
  if (value >= 1e-3 && value < 1e4) return number(value, 3);
  const power = Math.floor(Math.log10(value) + 1e-9);
  const step = Math.round(value / 10 ** power);
  return `${step === 1 ? "" : `${step}·`}10<sup>${power}</sup>`;
};
const valueAxis = (title, traces, logarithmic) => {
  const more = {};
  // Runs that diverged leave at the top: their last values would flatten all others.
  const finite = traces.filter((trace) => !trace.diverged);
  const sound = finite.length ? finite : traces;
  if (sound.length < traces.length) {
    const values = sound.flatMap((trace) => trace.y).filter((y) => Number.isFinite(y) && y > 0);
    const [low, high] = [Math.min(...values) / 1.15, Math.max(...values) * 1.15];
    more.range = logarithmic ? [Math.log10(low), Math.log10(high)] : [0, high];
  }
  return logarithmic ? axis(title, { type: "log", ...logTicks(sound), ...more }) : axis(title, more);
};

const layoutOf = (x, y, more = {}) => ({
  margin: { l: 56, r: 14, t: 10, b: 46 }, showlegend: false, dragmode: "zoom",
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
    size: 12.5, color: css("--soft") },
  hoverlabel: { bgcolor: css("--bg"), bordercolor: css("--line"), font: { color: css("--ink") } },
  xaxis: x, yaxis: y, hovermode: "closest", ...more,
});

let printing = false;
const draw = (id) => {
  const { traces, layout } = charts.get(id)();
  // On paper nobody resizes, and the page is narrower than the screen was.
  if (printing) Object.assign(layout, { width: $(id).clientWidth, height: $(id).clientHeight });
  else layout.autosize = true;
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
  printing = true;
  document.documentElement.classList.add("paper");
  document.documentElement.dataset.theme = "light";
  document.querySelectorAll("#again details").forEach((details) => { details.open = true; });
  drawAll();
});
addEventListener("afterprint", () => {
  printing = false;
  document.documentElement.classList.remove("paper");
  setTheme(before);
});
