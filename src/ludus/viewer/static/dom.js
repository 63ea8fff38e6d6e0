// Building pages. Everything that came from a model or a tool becomes a text node: nothing here parses markup.

export function h(tag, props, ...children) {
  const made = document.createElement(tag);
  fill(made, props, children);
  return made;
}

export function s(tag, props, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(made, props, children);
  return made;
}

function fill(made, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.setAttribute("class", value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) made.style.setProperty(key, one);
    else if (name === "value" || name === "checked" || name === "selected") made[name] = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  add(made, children);
}

export function add(parent, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return parent;
}

export function clear(parent, ...children) {
  parent.replaceChildren();
  return add(parent, children);
}

// What a screen would obey or hide: control characters, what turns the direction of text, halves of pairs.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function said(text) {
  const found = document.createDocumentFragment();
  let place = 0;
  for (const match of text.matchAll(CONTROL)) {
    if (match.index > place) found.append(text.slice(place, match.index));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    found.append(h("span", { class: "ctl", title: "an invisible character" }, `U+${code}`));
    place = match.index + match[0].length;
  }
  found.append(text.slice(place));
  return found;
}

export function plain(text) {
  return String(text).replace(CONTROL, (one) => `‹${one.codePointAt(0).toString(16)}›`);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en-US");
  if (size >= 1e6) return `${(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toFixed(size >= 100 ? 1 : size >= 10 ? Math.min(2, digits) : digits)));
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`);

// A difference with its sign, as it is read: what rounds to nothing has none, so that no "-0.0" stands in red.
export function signed(value, text = number) {
  const size = text(Math.abs(value)), sign = Number.parseFloat(size) === 0 ? 0 : Math.sign(value);
  return { sign, text: `${["−", "±", "+"][sign + 1]}${size}` };
}
export const points = (value, digits) => signed(value, (size) => `${(100 * size).toFixed(digits)} pts`);

export function ago(seconds) {
  const gone = Date.now() / 1000 - seconds;
  if (gone < 60) return "just now";
  for (const [size, name] of [[86400, "day"], [3600, "hour"], [60, "minute"]]) {
    const count = Math.floor(gone / size);
    if (count >= 1) return `${count} ${name}${count > 1 ? "s" : ""} ago`;
  }
  return "";
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return seconds < 120 ? `${seconds.toFixed(1)} s` : `${(seconds / 60).toFixed(1)} min`;
}

export function announce(text) {
  document.getElementById("live").textContent = text;
}

export function toast(text) {
  const made = h("div", { class: "toast", role: "status" }, text);
  document.body.append(made);
  setTimeout(() => made.remove(), 3500);
}

export function rewardClass(reward, success) {
  if (reward === null || reward === undefined) return "reward none";
  return success === true ? "reward good" : success === false ? "reward bad" : "reward";
}

export const colour = (place) => `c${place % 8}`;
