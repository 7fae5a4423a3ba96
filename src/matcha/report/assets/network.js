// The topology as SVG: colour, dash and letter by matching, width by activation.
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const matchingName = (j) => j < 26 ? LETTERS[j] : `M${j + 1}`;
const matchingColor = (j) => `var(--m${j % 10})`;
const matchingDash = (j) => j < 0 ? "" : STROKES[(j + Math.floor(j / 10)) % STROKES.length];
// Width is linear in activation; a silent link stays visible as a hairline. Thinner in a crowd.
const linkWidth = (activation, count) => {
  const widest = count <= 60 ? 7 : count <= 300 ? 4 : 2;
  return Math.min(1, widest / 5) + widest * Math.min(activation, 1.5);
};

const SIZE = 520;
const drawNetwork = (net, onLink, place = "graph") => {
  const pad = 34;
  const scale = SIZE - 2 * pad;
  const points = net.positions.map(([x, y]) => [pad + scale * x, pad + scale * y]);
  const width = Math.max(...points.map((p) => p[0])) + pad;
  const height = Math.max(...points.map((p) => p[1])) + pad;
  const count = points.length;
  const radius = count <= 20 ? 15 : count <= 40 ? 11 : count <= 100 ? 7 : 4;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "listbox",
    "aria-label": `Links of ${net.name}: arrow keys move from link to link`,
    "aria-orientation": "horizontal" });
  const tagged = net.links.length <= 60;
  const links = net.links.map(([i, j], e) => {
    const [[x1, y1], [x2, y2]] = [points[i], points[j]];
    const ends = { x1, y1, x2, y2, "stroke-linecap": "butt" };
    const group = element("g", { role: "option", tabindex: e ? -1 : 0, "aria-selected": "false",
      "data-link": `${i}-${j}` });
    const halo = element("line", { ...ends, class: "halo", "stroke-width": 16 });
    const line = element("line", { ...ends, class: "link" });
    const hit = element("line", { ...ends, class: "hit", "stroke-width": 16 });
    group.append(halo, line, hit);
    if (net.directed) {
      const angle = Math.atan2(y2 - y1, x2 - x1) * 180 / Math.PI;
      group.append(element("path", { class: "arrow", d: "M-7 -4L5 0L-7 4Z", fill: "currentColor",
        transform: `translate(${x1 + 0.72 * (x2 - x1)} ${y1 + 0.72 * (y2 - y1)}) rotate(${angle})` }));
    }
    const at = 0.5 + 0.07 * ((e % 3) - 1);
    const tag = element("g", { class: "tag", transform:
      `translate(${x1 + at * (x2 - x1)} ${y1 + at * (y2 - y1)})` });
    if (tagged) {
      tag.append(element("rect", { x: -8, y: -8, width: 16, height: 16, rx: 4 }),
        element("text", { "font-size": 11.5 }));
      group.append(tag);
    }
    const show = () => onLink(e, group);
    group.addEventListener("pointerenter", show);
    group.addEventListener("pointerleave", () => onLink(null, group));
    group.addEventListener("focus", () => { select(e); show(); });
    group.addEventListener("blur", () => onLink(null, group));
    svg.append(group);
    return { group, line, tag: tag.querySelector("text"), box: tag };
  });
  const select = (e) => links.forEach(({ group }, other) => {
    group.setAttribute("tabindex", other === e ? 0 : -1);
    group.setAttribute("aria-selected", other === e);
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const now = links.findIndex(({ group }) => group === document.activeElement);
    const to = event.key === "Home" ? 0 : event.key === "End" ? links.length - 1
      : step === undefined ? null : (now + step + links.length) % links.length;
    if (to === null || now < 0) return;
    event.preventDefault();
    links[to].group.focus();
  });
  points.forEach(([cx, cy], i) => {
    const node = element("g", { "aria-hidden": "true" });
    node.append(element("circle", { class: "node", cx, cy, r: radius }));
    if (count <= 40) node.append(element("text", { x: cx, y: cy, "font-size": radius * 0.85 },
      net.labels[i].slice(0, 4)));
    else node.append(element("title", {}, `worker ${net.labels[i]}`));
    svg.append(node);
  });
  $(place).replaceChildren(svg);
  return links;
};

const styleLinks = (links, point, plain, describe) => links.forEach((link, e) => {
  const activation = point.activation[e];
  const j = point.matching ? point.matching[e] : -1;
  link.line.setAttribute("stroke-width", linkWidth(activation, links.length).toFixed(3));
  link.line.setAttribute("stroke", j < 0 ? plain : matchingColor(j));
  link.line.setAttribute("stroke-dasharray", activation > 0 ? matchingDash(j) : "1 5");
  link.line.setAttribute("stroke-opacity", activation > 0 ? 0.95 : 0.6);
  link.group.setAttribute("data-activation", activation);
  link.group.setAttribute("aria-label", describe(e));
  if (link.tag) {
    link.tag.textContent = j < 0 ? "" : matchingName(j);
    link.box.setAttribute("visibility", j < 0 ? "hidden" : "visible");
  }
});
