// Small things that every part of the page uses.
const data = JSON.parse(document.getElementById("matcha-data").textContent);
const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const STROKES = ["", "8 4", "2 4", "8 4 2 4", "14 5", "14 5 2 5"];
// How runs look is decided where strategies are listed; --s0, --s1, … are the styles' colours.
const SYMBOLS = data.styles.map((style) => style.symbol);
const LINE_DASH = data.styles.map((style) => style.dash);
const NAMES = {
  train_loss: "training loss", worker_loss: "workers' own loss", test_loss: "test loss", test_accuracy: "test accuracy",
  consensus_distance: "consensus distance", predicted_consensus: "predicted",
  gradient_norm: "average squared gradient norm", epoch: "epochs", time: "seconds",
  iteration: "iterations", comm_units: "communication", megabytes_sent: "megabytes",
};

const element = (tag, attributes = {}, ...children) => {
  const svg = ["svg", "g", "line", "circle", "text", "rect", "title", "path"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};

const number = (value, digits = 4) => {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
};
const percent = (value) => `${number(100 * value, 3)} %`;

// A stretch of line as the charts draw it: colour, dash and marker, so colour is not alone.
const swatch = (style) => {
  const stroke = `var(--s${style})`;
  const svg = element("svg", { viewBox: "0 0 30 12", width: 30, height: 12, "aria-hidden": "true" });
  svg.append(element("line", { x1: 1, y1: 6, x2: 29, y2: 6, stroke, "stroke-width": 2.5,
    "stroke-dasharray": STROKES[LINE_DASH[style]] }));
  svg.append(marker(SYMBOLS[style], stroke));
  return svg;
};
const marker = (symbol, fill) => {
  const paths = {
    x: "M11 2l8 8M19 2l-8 8", "triangle-up": "M15 1l5 9h-10z", square: "M11 2h8v8h-8z",
    diamond: "M15 1l5 5-5 5-5-5z",
  };
  if (!paths[symbol]) return element("circle", { cx: 15, cy: 6, r: 4, fill });
  return element("path", { d: paths[symbol], fill: symbol === "x" ? "none" : fill,
    stroke: fill, "stroke-width": symbol === "x" ? 2.5 : 0 });
};
// A legend for one chart: what each line, bar or colour stands for.
const listKeys = (id, entries) => {
  const figure = $(id).closest("figure");
  figure.querySelector("ul.keys")?.remove();
  const keys = element("ul", { class: "keys", "aria-label": "Legend" },
    ...entries.map(([key, text]) => element("li", {}, key, text)));
  $(id).before(keys);
};
const barKey = (style) => {
  const svg = element("svg", { viewBox: "0 0 34 12", "aria-hidden": "true" });
  svg.append(element("rect", { width: 34, height: 12, fill: `var(--s${style})` }));
  return svg;
};
document.querySelectorAll(".swatch").forEach((s) => s.append(swatch(s.dataset.style)));

// A table behind <details>, built when it is first opened and each time it is opened again.
const dataTables = {};
// What is behind a chart, as a file that spreadsheets and pandas read.
const csvOf = ({ head, rows }) => [head, ...rows].map((row) => row.map((cell) => {
  const text = String(cell ?? "");
  return /[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}).join(",")).join("\r\n");
const save = (name, content, type) => {
  const link = element("a", { download: name });
  link.href = content instanceof Blob || type ? URL.createObjectURL(new Blob([content], { type }))
    : content;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};
const saveTable = (name) => save(`matcha-${name}.csv`, csvOf(dataTables[name]()), "text/csv");

const fillTable = (details) => {
  const { head, rows } = dataTables[details.dataset.table]();
  const table = element("table");
  const line = (cells, tag) => element("tr", {}, ...cells.map((cell, i) => {
    const scope = tag === "th" ? { scope: "col" } : {};
    return element(i === 0 && tag === "td" ? "th" : tag,
      i === 0 && tag === "td" ? { scope: "row" } : scope,
      typeof cell === "number" ? number(cell, 5) : String(cell ?? "–"));
  }));
  table.append(element("thead", {}, line(head, "th")));
  table.append(element("tbody", {}, ...rows.slice(0, 2000).map((row) => line(row, "td"))));
  details.querySelector(".scroll")?.remove();
  const box = element("div", { class: "scroll", tabindex: 0, role: "group",
    "aria-label": details.querySelector("summary").textContent }, table);
  details.append(box);
  hintScroll(box);
};
// A table wider than its place says so: a shadow at the side where more is, and a line of text.
const hintScroll = (box) => {
  const say = () => {
    const hidden = box.scrollWidth - box.clientWidth;
    box.classList.toggle("more-right", hidden > 4 && box.scrollLeft < hidden - 4);
    box.classList.toggle("more-left", hidden > 4 && box.scrollLeft > 4);
  };
  box.addEventListener("scroll", say, { passive: true });
  new ResizeObserver(say).observe(box);
  say();
};
document.querySelectorAll(".scroll").forEach(hintScroll);
document.querySelectorAll("details.data").forEach((details) =>
  details.addEventListener("toggle", () => details.open && fillTable(details)));

// A row of radio buttons that looks like one control.
const segments = (id, options, chosen, change) => {
  const box = element("div");
  for (const [value, text] of options) {
    const input = element("input", { type: "radio", name: id, value });
    input.checked = value === chosen;
    input.addEventListener("change", () => change(value));
    box.append(element("label", {}, input, element("span", {}, text)));
  }
  $(id).querySelector("div")?.remove();
  $(id).append(box);
  $(id).hidden = options.length < 2;
};

const note = $("target-note");
if (data.target !== null) {
  const everyone = data.runs.some((run) => run.diverged) ? "run that did not diverge" : "run";
  const what = data.target_given ? "set for the runs" : `the lowest that every ${everyone} reached`;
  note.textContent = `Target: ${NAMES[data.objective] ?? "loss"} ${number(data.target)}, ${what}. ` +
    "Communication is counted up to the target; the rest is the state at the end of the run.";
}
