// Line charts in SVG: smoothing, zoom by dragging, values under the pointer or by arrow keys.

import { clear, colour, h, number, plain, s } from "./dom.js";

const LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 22;

// Exponential moving average with bias correction, as trackers do it; `weight` 0 leaves values as they are.
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, norm = 0;
  return values.map((value) => {
    mean = mean * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return mean / norm;
  });
}

function ticks(low, high, count) {
  if (!(high - low > Math.abs(high) * 1e-9)) return [low];
  const raw = (high - low) / count, size = 10 ** Math.floor(Math.log10(raw));
  const step = size * ([1, 2, 2.5, 5, 10].find((one) => one * size >= raw) || 10);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6 && found.length < 20; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

// Where a step is between `first` and `last`, from 0 to 1, and back. Each stage has as much room as it has of itself to
// show, however many steps it took: 20 steps of RL are not squeezed behind 300 of a warm start.
function stageScale(first, last, stages) {
  let at = 0;
  const shown = stages.filter((one) => one.end > one.start && one.start < last && one.end > first);
  const parts = shown.map(({ name, start, end }, n) => {
    const from = n ? start : first, to = n < shown.length - 1 ? end : last;
    return { name, from, to, room: Math.min(1, (to - from) / (end - start)) };
  });
  if (!parts.length) parts.push({ name: "", from: first, to: last, room: 1 });
  const all = parts.reduce((sum, part) => sum + part.room, 0) || 1;
  for (const part of parts) { part.at = at; part.room = part.room / all || 1; at += part.room; }
  return {
    parts,
    to: (step) => {
      const part = parts.find((one) => step <= one.to) || parts.at(-1);
      return part.at + part.room * (part.to === part.from ? 0.5 : (step - part.from) / (part.to - part.from));
    },
    back: (share) => {
      const part = parts.find((one) => share <= one.at + one.room) || parts.at(-1);
      return part.from + (part.to - part.from) * Math.max(0, Math.min(1, (share - part.at) / part.room));
    },
  };
}

// lines: [{run, metric, name, steps, values, low, high, colour, dash}]; options: {title, definition, stages, smooth, height, onzoom}
export function chart(lines, options) {
  const shown = lines.filter((line) => line.values.length);
  const last = shown.length === 1 ? shown[0].values.at(-1) : null;
  const tip = h("div", { class: "tip", hidden: true });
  const definition = options.definition;
  const what = definition && h("button", { class: "what", type: "button", "aria-label": `What is ${options.title}? ${definition.definition}` }, "?");
  const summary = shown.map((line) => `${line.name}: from ${number(line.values[0])} to ${number(line.values.at(-1))}`).join("; ");
  const height = options.height || 190;
  const box = s("svg", { role: "img", tabindex: 0, "aria-label": `${options.title}. ${summary}` });
  const made = h("figure", { class: "chart", style: { margin: 0 } },
    h("h3", {}, h("span", {}, plain(options.title)), what, last !== null && h("span", { class: "last" }, number(last))),
    box,
    lines.length > 1 && legend(lines),
    tip);
  if (what) {
    const show = () => { clear(tip, h("b", {}, options.title), h("div", {}, definition.definition), definition.unit !== "any" && h("div", {}, `Unit: ${definition.unit}`)); tip.style.left = "16px"; tip.style.top = "40px"; tip.hidden = false; };
    what.addEventListener("pointerenter", show); what.addEventListener("focus", show);
    what.addEventListener("pointerleave", () => { tip.hidden = true; }); what.addEventListener("blur", () => { tip.hidden = true; });
  }
  if (!shown.length) {
    clear(box, s("text", { class: "axis", x: "50%", y: "50%", "text-anchor": "middle" }, "nothing logged"));
    return made;
  }
  let width = 0, listening = null;
  new ResizeObserver(([entry]) => {
    const now = Math.round(entry.contentRect.width);
    if (!now || now === width) return;
    width = now;
    listening?.abort();
    listening = new AbortController();
    box.replaceChildren();
    box.setAttribute("viewBox", `0 0 ${width} ${box.clientHeight || height}`);
    draw(box, tip, shown, options, width, box.clientHeight || height, listening.signal);
  }).observe(box);
  return made;
}

// One entry for each run, or for each metric of one run; of several runs with several metrics also which dashes are which.
function legend(lines) {
  const metrics = [...new Map(lines.map((line) => [line.metric, line.dash])).entries()], runs = Map.groupBy(lines, (line) => line.run);
  const entries = runs.size === 1 ? lines.map((line) => [line.metric, line.colour, [line]]) : [...runs].map(([run, own]) => [run, own[0].colour, own]);
  return h("div", { class: "legend" },
    entries.map(([name, tone, own]) => h("span", {}, h("i", { class: tone }), plain(name), h("b", {}, own.map((line) => number(line.values.at(-1))).join(" · ")))),
    runs.size > 1 && metrics.length > 1 && metrics.map(([metric, dash]) => h("span", {}, s("svg", { class: "swatch", viewBox: "0 0 22 4" }, s("path", { class: `dash${dash}`, d: "M0,2H22" })), plain(metric))));
}

function draw(box, tip, lines, options, WIDTH, height, signal) {
  const steps = lines.flatMap((line) => [line.steps[0], line.steps.at(-1)]);
  const first = Math.min(...steps), last = Math.max(...steps);
  // evaluations are few and each is a measurement: they are not smoothed
  const curves = lines.map((line) => {
    const few = line.values.length < 12, soft = (values) => values && smoothed(values, few ? 0 : options.smooth || 0);
    return { ...line, few, smooth: soft(line.values), band: line.low && [soft(line.low), soft(line.high)] };
  });
  let low = Infinity, high = -Infinity;
  for (const line of curves) for (const value of line.band ? line.band.flat() : [...line.smooth, ...line.values]) { if (value < low) low = value; if (value > high) high = value; }
  if (options.share) { low = Math.min(0, low); high = Math.max(1, high); }
  if (high - low <= Math.abs(high) * 1e-9) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const margin = options.share ? 0 : (high - low) * 0.06; low -= margin; high += margin;
  const scale = stageScale(first, last, options.stages || []), across = WIDTH - LEFT - RIGHT;
  const x = (step) => LEFT + scale.to(step) * across;
  const y = (value) => TOP + (1 - (value - low) / (high - low)) * (height - TOP - BOTTOM);
  const path = (line, values) => values.map((value, n) => `${n ? "L" : "M"}${x(line.steps[n]).toFixed(1)},${y(value).toFixed(1)}`).join("");
  for (const value of ticks(low, high, 4)) {
    box.append(s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }), s("text", { class: "axis", x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, number(value, 2)));
  }
  let free = -Infinity; // where the last number ends
  for (const part of scale.parts) {
    for (const step of ticks(part.from, part.to, Math.max(1, Math.round(5 * part.room))).filter(Number.isInteger)) {
      const half = 3.5 * String(step).length + 3;
      if (x(step) - half < free) continue;
      free = x(step) + half;
      box.append(s("text", { class: "axis", x: x(step), y: height - 5, "text-anchor": "middle" }, String(step)));
    }
    if (scale.parts.length === 1) continue;
    if (part.at) box.append(s("line", { class: "stage", x1: x(part.from), x2: x(part.from), y1: TOP - 8, y2: height - BOTTOM }));
    box.append(s("text", { class: "axis", x: LEFT + part.at * across + 4, y: TOP - 1 }, plain(part.name)));
  }
  for (const line of curves) {
    const kind = `${line.colour} ${line.dash ? `dash${line.dash}` : ""}`;
    if (line.band) {
      const [least, most] = line.band, back = (n) => least.length - 1 - n;
      box.append(s("path", { class: `band ${line.colour}`, d: `${path(line, most)}${least.map((_, n) => `L${x(line.steps[back(n)]).toFixed(1)},${y(least[back(n)]).toFixed(1)}`).join("")}Z` }));
    }
    if (line.values.length === 1) box.append(s("circle", { class: `series ${kind}`, cx: x(line.steps[0]), cy: y(line.values[0]), r: 3 }));
    if (line.few) line.values.forEach((value, n) => box.append(s("circle", { class: `dot ${line.colour}`, cx: x(line.steps[n]), cy: y(value), r: 3.2 })));
    else if (options.smooth && !line.band) box.append(s("path", { class: `raw ${kind}`, d: path(line, line.values), "vector-effect": "non-scaling-stroke" }));
    box.append(s("path", { class: `series ${kind}`, d: path(line, line.smooth), "vector-effect": "non-scaling-stroke" }));
  }
  const cross = s("line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  const zoom = s("rect", { class: "zoom", y: TOP, height: height - TOP - BOTTOM, visibility: "hidden" });
  box.append(cross, zoom);
  let begun = null, at = null;
  const stepAt = (event) => {
    const frame = box.getBoundingClientRect();
    return scale.back(((event.clientX - frame.left) / frame.width * WIDTH - LEFT) / across);
  };
  const show = (step) => {
    let nearest = curves[0].steps[0];
    for (const line of curves) for (const one of line.steps) if (Math.abs(one - step) < Math.abs(nearest - step)) nearest = one;
    at = nearest;
    cross.setAttribute("x1", x(nearest)); cross.setAttribute("x2", x(nearest)); cross.setAttribute("visibility", "visible");
    clear(tip, h("b", {}, `step ${nearest}`), curves.map((line) => {
      const n = line.steps.indexOf(nearest);
      return n >= 0 && h("div", { class: "line" }, h("i", { class: line.colour }), `${curves.length > 1 ? `${plain(line.name)} ` : ""}${number(line.values[n], 4)}${line.band ? ` (${number(line.low[n])} to ${number(line.high[n])}, ${line.runs[n]} runs)` : ""}`);
    }));
    tip.hidden = false;
    const share = x(nearest) / WIDTH, width = box.clientWidth;
    tip.style.top = "44px";
    tip.style.left = share > 0.55 ? "" : `${share * width + 30}px`;
    tip.style.right = share > 0.55 ? `${(1 - share) * width + 30}px` : "";
  };
  const hide = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); };
  box.addEventListener("pointermove", (event) => {
    const step = stepAt(event);
    if (begun !== null) {
      zoom.setAttribute("x", Math.min(x(begun), x(step))); zoom.setAttribute("width", Math.abs(x(step) - x(begun))); zoom.setAttribute("visibility", "visible");
    }
    show(step);
  }, { signal });
  box.addEventListener("pointerleave", hide, { signal });
  box.addEventListener("blur", hide, { signal });
  box.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse" && options.onzoom) { begun = stepAt(event); box.setPointerCapture(event.pointerId); } }, { signal });
  box.addEventListener("pointerup", (event) => {
    if (begun === null) return;
    const ends = [begun, stepAt(event)].sort((a, b) => a - b).map(Math.round);
    begun = null; zoom.setAttribute("visibility", "hidden");
    if (ends[1] - ends[0] >= 2) options.onzoom(...ends);
  }, { signal });
  box.addEventListener("dblclick", () => options.onzoom?.(null, null), { signal });
  box.addEventListener("keydown", (event) => {
    const all = curves[0].steps, place = all.indexOf(at);
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      event.preventDefault(); event.stopPropagation();
      show(all[Math.max(0, Math.min(all.length - 1, place < 0 ? 0 : place + (event.key === "ArrowRight" ? 1 : -1)))]);
    } else if (event.key === "Escape") { hide(); options.onzoom?.(null, null); }
  }, { signal });
}

export function sparkline(points, stages) {
  if (points.length < 2) return h("span", { class: "faint small" }, points.length ? "one point" : "nothing logged yet");
  const steps = points.map((one) => one[0]), values = points.map((one) => one[1]);
  const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
  const scale = stageScale(steps[0], steps.at(-1), stages);
  const at = points.map(([step, value]) => `${(100 * scale.to(step)).toFixed(2)},${(40 - 36 * (value - low) / span).toFixed(2)}`);
  return s("svg", { class: "spark", viewBox: "0 0 100 44", preserveAspectRatio: "none", role: "img", "aria-label": `from ${number(values[0])} to ${number(values.at(-1))}` },
    s("path", { class: "under", d: `M0,44L${at.join("L")}L100,44Z` }), s("path", { d: `M${at.join("L")}` }));
}

// Metrics that belong together share a chart: the parts of a reward, the calls and errors of a tool.
export function families(names) {
  const charts = new Map();
  for (const name of names) {
    const bare = name.replace(/^eval\//, "");
    const tool = bare.match(/^tool\/(.*)\/(calls|errors)$/);
    let key = bare;
    if (tool) key = `tool ${tool[1]}`;
    else if (/^(reward|failure|failure_mode|stop|time_share|seconds|tokens|fault|fault_share|broken)\/./.test(bare)) key = `${name.startsWith("eval/") ? "eval/" : ""}${bare.split("/")[0]}/*`;
    else if (/^clip_fraction/.test(bare)) key = "clip_fraction";
    else if (/^(success|success_low|success_high)$/.test(bare)) key = "success";
    else if (/^lag_/.test(bare)) key = "staleness (versions behind)";
    else if (/^logprob_difference_/.test(bare)) key = "engine against trainer";
    if (!charts.has(key)) charts.set(key, []);
    charts.get(key).push(name);
  }
  for (const members of charts.values()) members.sort((a, b) => a.startsWith("eval/") - b.startsWith("eval/"));
  return charts;
}

export const isShare = (definition) => definition?.unit === "share";
export { colour };
