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
// A logarithmic axis has no place for zero: plotly would draw a fall to its foot.
const withoutZeros = (traces) => traces.map((trace) =>
  ({ ...trace, y: trace.y.map((y) => (y > 0 ? y : null)) }));
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
  // Paper is not resized, and the page is narrower than the screen was.
  if (printing) Object.assign(layout, { width: $(id).clientWidth, height: $(id).clientHeight });
  else layout.autosize = true;
  Plotly.react($(id), traces, layout, { displayModeBar: false, responsive: true });
  $(id).dataset.drawn = "yes";
};

// The first charts are drawn at once and the others one by one right after, so that the page opens
// quickly and a picture of the whole page still holds every chart.
const waiting = [];
const drawNext = () => {
  const id = waiting.shift();
  if (id === undefined) { document.documentElement.dataset.complete = "yes"; return; }
  if (!$(id).dataset.drawn) draw(id);
  setTimeout(drawNext, 0);
};
const chart = (id, make) => {
  charts.set(id, make);
  if ($(id).dataset.drawn) draw(id); else waiting.push(id);
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

// -- charts as pictures and numbers as files
const picture = async (id, format) => {
  const { data: traces, layout } = $(id);
  const legend = { showlegend: traces.length > 1, paper_bgcolor: css("--bg"), plot_bgcolor: css("--bg"),
    legend: { orientation: "h", y: -0.25 }, margin: { l: 70, r: 80, t: 24, b: 60 } };
  const url = await Plotly.toImage({ data: traces, layout: { ...layout, ...legend } },
    { format, width: 900, height: 540, scale: format === "png" ? 2 : 1 });
  return url;
};
const drawing = (id) => {
  const svg = $(id).querySelector("svg").cloneNode(true);
  const styled = $(id).querySelectorAll("svg *");
  svg.querySelectorAll("*").forEach((part, i) => {
    const seen = getComputedStyle(styled[i]);
    for (const name of ["fill", "stroke", "font-family", "font-weight", "text-anchor",
      "dominant-baseline"]) part.style.setProperty(name, seen.getPropertyValue(name));
  });
  svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  svg.style.background = css("--panel");
  return new XMLSerializer().serializeToString(svg);
};
const rasterized = (text) => new Promise((done) => {
  const image = new Image();
  image.onload = () => {
    const canvas = element("canvas");
    Object.assign(canvas, { width: 1040, height: 1040 * image.height / image.width });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    done(canvas.toDataURL("image/png"));
  };
  const [, , width, height] = /viewBox="([^"]*)"/.exec(text)[1].split(" ");
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(
    text.replace("<svg", `<svg width="${width}" height="${height}"`))}`;
});
const savePicture = async (figure, format) => {
  const { chart: id, drawing: graph } = figure.dataset;
  const name = `matcha-${(id ?? graph).replace("chart-", "")}.${format}`;
  if (id) return save(name, await picture(id, format));
  return format === "svg" ? save(name, drawing(graph), "image/svg+xml")
    : save(name, await rasterized(drawing(graph)));
};
const addTools = () => document.querySelectorAll("[data-chart], [data-drawing]").forEach((figure) => {
  const title = figure.querySelector("figcaption");
  const button = (text, act) => {
    const made = element("button", { type: "button", class: "quiet small" }, text,
      element("span", { class: "sr" }, `: ${title.firstChild.textContent}`));
    made.addEventListener("click", act);
    return made;
  };
  const table = figure.dataset.csv ?? figure.querySelector("details.data")?.dataset.table;
  title.append(element("span", { class: "tools" },
    button("PNG", () => savePicture(figure, "png")),
    button("SVG", () => savePicture(figure, "svg")),
    ...(table ? [button("CSV", () => saveTable(table))] : [])));
});

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
